"""The page's style sheet."""

STYLE = """
:root{--back:#fbfaf7;--card:#fff;--ink:#1d2126;--soft:#646b74;--rule:#e3e0d8;--mark:#0b62a8;--key:#0072b2}
@media (prefers-color-scheme:dark){
:root{--back:#14171a;--card:#1c2024;--ink:#e6e4df;--soft:#99a1aa;--rule:#31373d;--mark:#74b8f0;--key:#56b4e9}
figure svg{filter:invert(1) hue-rotate(180deg) brightness(1.3)}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
body{margin:0;background:var(--back);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
header,main{max-width:1120px;margin:0 auto;padding:0 16px}
header{padding-top:28px}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 6px;letter-spacing:-.015em}
h2{font-size:1.3rem;margin:44px 0 14px;padding-bottom:6px;border-bottom:2px solid var(--rule)}
h3{font-size:1rem;margin:0 0 10px;overflow-wrap:anywhere}
h4{font-size:.85rem;margin:0 0 6px;color:var(--soft);font-weight:600;overflow-wrap:anywhere}
nav{display:flex;flex-wrap:wrap;gap:4px 18px;padding:10px 0}
nav a{color:var(--mark);text-decoration:none;padding:4px 0}
nav a:hover{text-decoration:underline}
figure{margin:0 0 20px;padding:16px;background:var(--card);border:1px solid var(--rule);border-radius:10px}
.note+details{margin-top:14px}
.note{color:var(--soft);font-size:.85rem;margin:10px 0 0;overflow-wrap:anywhere}
.wide{overflow-x:auto;-webkit-overflow-scrolling:touch}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:6px 12px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--rule)}
thead th{color:var(--soft);font-weight:600;font-size:.8rem;vertical-align:bottom;border-bottom-width:2px}
tbody th,thead th:first-child{text-align:left;position:sticky;left:0;background:var(--card);font-weight:600}
tbody tr:hover td,tbody tr:hover th{background:var(--back)}
tbody tr:last-child>*{border-bottom:0}
td.words{text-align:left}
td small{color:var(--soft)}
td b{color:var(--mark)}
.panels,.cards{display:grid;gap:20px;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr))}
.cards{grid-template-columns:repeat(auto-fit,minmax(min(100%,270px),1fr))}
.cards p{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font-size:.92rem;max-height:22em;overflow-y:auto}
.cards>div{border-left:3px solid var(--rule);padding-left:12px;min-width:0}
.prompt{margin:0 0 12px;padding:8px 12px;background:var(--back);border-radius:6px;white-space:pre-wrap;
overflow-wrap:anywhere;font-size:.9rem;max-height:12em;overflow-y:auto}
.score{background:var(--back);border:1px solid var(--rule);border-radius:99px;padding:1px 8px;margin-left:4px}
figure svg{display:block;width:100%;min-width:640px;max-width:1040px;height:auto}
figure svg *{stroke-linejoin:round}
figure svg text{font-family:inherit!important}
.order{display:flex;flex-wrap:wrap;max-width:448px}
.order i{width:13px;height:13px;margin:0 1px 1px 0;background:var(--key);outline:1px solid var(--rule)}
.order .none{background:none}
details{margin:0 0 8px;padding:8px 14px;background:var(--card);border:1px solid var(--rule);border-radius:8px}
summary{cursor:pointer;overflow-wrap:anywhere;font-weight:600;font-size:.95rem}
details[open]>summary{margin-bottom:12px}
dl{display:grid;grid-template-columns:minmax(80px,max-content) 1fr;gap:4px 16px;font-size:.85rem}
dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere;min-width:0}
code{font-size:.9em;overflow-wrap:anywhere}
@media (max-width:560px){figure{padding:12px}th,td{padding:6px 8px}
tbody th{white-space:normal;min-width:7em;max-width:38vw}}
@media print{nav{display:none}figure{break-inside:avoid}}
"""

// The page of `adjust serve`: asks /v1/canvas once for each column and shows every commit. No framework, no build.
// A canvas is a list of cells, one for each position; a cell is given, or empty until a commit gives it its token.
// Time is counted in base passes: the slider goes through them, and all that is shown is as it was after that pass.
// Text only ever goes into textContent: what a model writes is never read as HTML.

const $ = (id) => document.getElementById(id);
const COLUMNS = ["joint", "parallel", "adjust"];
const QUESTIONS = ["Write a short story about a dog.", "What is the capital of France?", "Name three animals that can fly."];
const KINDS = { // label, hint, examples
  messages: ["Question", "The chat template goes around it. Ctrl+Enter starts.", QUESTIONS],
  chat: ["Conversation", "Each column keeps its own answers. Ctrl+Enter sends.", QUESTIONS],
  prompt: ["Beginning of a text", "May be empty.", ["Once upon a time", "The best way to learn a language is"]],
  parts: ["Text with gaps", "{5} is a gap of five tokens. Length and blocks do not count here.",
    ["The cat {3} on the mat.", "I like {2}, but not {2}."]], // short: a block base fills gaps within one block
};
const ABOUT = { // what a decoder does with the K tokens of a pass: in its column, and behind the closing sentence
  joint: [() => "1 token a pass", ""],
  parallel: [(k) => `${k} tokens a pass, none sees the others`, ", but the tokens of a pass did not see each other"],
  adjust: [(k) => `${k} tokens a pass, each sees those before it`, ", and each token saw those before it"],
};
const encoder = new TextEncoder();
let model = null; // what /v1/models says
let columns = [];
let running = null; // AbortController of the present run
let limit = Infinity; // base passes shown
let player = 0; // timer of the replay

// The server -------------------------------------------------------------------------------------------------------

function headers() {
  const key = $("key").value;
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

async function ask(path, options = {}) {
  const response = await fetch(path, { headers: headers(), ...options });
  if (response.ok) return response;
  if (response.status === 401) $("key-label").hidden = false;
  const text = await response.text();
  let said = text;
  try { said = JSON.parse(text).error.message; } catch { /* not from our server, but from something in between */ }
  throw new Error(`${response.status}: ${said || response.statusText}`);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const line = part.split("\n").find((one) => one.startsWith("data: "));
      if (line) yield JSON.parse(line.slice(6));
    }
  }
}

async function meet() {
  try {
    model = (await (await ask("v1/models")).json()).data[0];
  } catch (error) {
    $("problem").textContent = error.message;
    return;
  }
  $("problem").textContent = "";
  $("model").textContent = `${model.id}, context ${model.context} tokens`;
  const { tokens_per_step, temperature, max_tokens, top_p, block_length } = model.defaults;
  [$("k").value, $("temperature").value, $("length").value] = [tokens_per_step, temperature, max_tokens];
  [$("top_p").placeholder, $("block").placeholder] = [top_p, block_length ?? "none"];
  $("nll").disabled = !model.nll;
  $("nll-missing").hidden = model.nll;
  const taking = model.decoders.filter(takesTau);
  $("tau-for").textContent = ` (${taking.join(", ")})`;
  $("tau").disabled = !taking.length;
  if (!model.chat) {
    for (const kind of ["messages", "chat"]) document.querySelector(`[name=kind][value=${kind}]`).disabled = true;
    document.querySelector("[name=kind][value=prompt]").checked = true;
    changeKind();
  }
  for (const { select } of columns) {
    const before = select.value;
    select.replaceChildren(...[...model.decoders, "none"].map((name) => new Option(name)));
    select.value = model.decoders.includes(before) ? before : "none";
  }
  showCaptions();
  readLink();
}

// Settings in the address ------------------------------------------------------------------------------------------

// Every control with a name, and so never the key; behind the #, which no browser sends to a server.
const link = () => `#${new URLSearchParams(new FormData($("ask")))}`;

function readLink() {
  if (!location.hash) return;
  const said = new URLSearchParams(location.hash.slice(1)), wrong = [];
  for (const control of $("ask").elements) {
    const { name, type } = control, value = said.get(name), box = type === "checkbox";
    if (!name || (value === null && !box)) continue; // a box that is not ticked is not in the address
    if (box || type === "radio") control.checked = value === control.value && !control.disabled;
    else control.value = value;
    if (box ? control.checked === (value === null) : type !== "radio" && control.value !== value) wrong.push(`${name}=${value}`);
  }
  for (const name of ["kind", "colour"]) {
    if (document.querySelector(`[name=${name}]:checked`)) continue;
    wrong.push(`${name}=${said.get(name)}`);
    document.querySelector(`[name=${name}]:enabled`).checked = true;
  }
  for (const { select } of columns) select.value ||= "none";
  if (wrong.length) $("problem").textContent = `the link asks for ${wrong.join(", ")}, which this page cannot do`;
  showKind();
  showColours();
  showCaptions();
}

async function copy(button, text) {
  const label = (button.dataset.label ??= button.textContent);
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch { // browsers allow it over https and from this machine
    button.textContent = "Not allowed here";
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}

// What is asked ----------------------------------------------------------------------------------------------------

const chosen = (name) => document.querySelector(`[name=${name}]:checked`).value;
const takesTau = (decoder) => Boolean(model.decoder_settings[decoder]?.includes("tau"));
const takesK = (decoder) => model.takes_tokens_per_step.includes(decoder);

function body(column) {
  const kind = chosen("kind"), text = $("text").value, decoder = column.select.value;
  const out = { decoder, temperature: $("temperature").valueAsNumber, seed: $("seed").valueAsNumber };
  if (takesK(decoder)) out.tokens_per_step = $("k").valueAsNumber;
  if ($("nll").checked) out.nll = true;
  if ($("order").value) out.order = $("order").value;
  if ($("top_p").value) out.top_p = $("top_p").valueAsNumber;
  if ($("tau").value && takesTau(decoder)) out.decoder_options = { tau: $("tau").valueAsNumber };
  if (kind === "parts") {
    const split = text.split(/\{(\d+)\}/);
    out.parts = split.filter((_, i) => i % 2 === 0);
    out.gaps = split.filter((_, i) => i % 2).map(Number);
    return out;
  }
  out.max_tokens = $("length").valueAsNumber;
  if ($("block").value) out.block_length = $("block").valueAsNumber;
  if (kind === "prompt") return text ? { ...out, prompt: text } : out;
  return { ...out, messages: [...column.messages, { role: "user", content: text }] };
}

function showKind() {
  const kind = chosen("kind"), [label, hint, examples] = KINDS[kind];
  $("text-label").textContent = label;
  $("hint").textContent = hint;
  $("text").required = kind === "messages" || kind === "chat";
  $("length").disabled = $("block").disabled = kind === "parts";
  $("anew").hidden = kind !== "chat";
  $("examples").replaceChildren(...examples.map((text) => {
    const button = document.createElement("button");
    [button.type, button.textContent] = ["button", text];
    button.addEventListener("click", () => { $("text").value = text; $("ask").requestSubmit(); });
    return button;
  }));
}

function changeKind() {
  const untouched = Object.values(KINDS).some(([, , examples]) => examples.includes($("text").value));
  if (untouched) [$("text").value] = KINDS[chosen("kind")][2];
  showKind();
}

function showCaptions() {
  for (const { select, caption } of columns) caption.textContent = ABOUT[select.value]?.[0]($("k").value) ?? "";
}

// A column ---------------------------------------------------------------------------------------------------------

function makeColumn(decoder, index) {
  const node = $("column").content.cloneNode(true).firstElementChild;
  const names = ["select", "caption", "turns", "canvas", "plain", "problem"];
  const parts = Object.fromEntries(names.map((name) => [name, node.querySelector(name === "select" ? name : `.${name}`)]));
  parts.select.name = `decoder${index + 1}`;
  parts.select.append(new Option(decoder));
  node.querySelector(".copy").addEventListener("click", ({ target }) => copy(target, parts.plain.textContent));
  $("columns").append(node);
  return { node, ...parts, messages: [], question: null, ...BLANK };
}

// `rounds`: the cost after each, and when it came; `row`: the last event of the row; `answer`: once all has come.
const BLANK = { cells: [], open: 0, rounds: [], end: Infinity, started: null, live: false, row: null, nll: null, answer: null };

function clear(column) {
  Object.assign(column, BLANK, { rounds: [] });
  column.problem.textContent = "";
  showTurns(column);
  draw(column);
}

// A turn that was answered belongs to the conversation; one that was stopped or failed does not.
function keepTurn(column) {
  const { question: content, answer } = column;
  if (content !== null && answer !== null) column.messages.push({ role: "user", content }, { role: "assistant", content: answer });
  column.question = column.answer = null;
}

function showTurns(column) {
  const now = column.question === null ? [] : [{ role: "user", content: column.question }];
  column.turns.replaceChildren(...[...column.messages, ...now].map(({ role, content }) => {
    const p = document.createElement("p");
    [p.className, p.textContent] = [role, `${role === "user" ? "You" : "Answer"}: ${content}`];
    return p;
  }));
}

const since = (column) => (performance.now() - column.started) / 1000;
const counted = (number, one, more = `${one}s`) => `${number} ${number === 1 ? one : more}`;
const passes = (event, kind) => counted(event[`${kind}_calls`], `${kind} pass`, `${kind} passes`);

const take = {
  start(column, { rows: [row] }) {
    column.cells = [...row.masks.map((position) => ({ position })), ...(row.given ?? []).map((cell) => ({ ...cell, given: true }))];
    column.cells.sort((a, b) => a.position - b.position);
    column.open = row.masks.length;
    column.at = new Map(column.cells.map((cell) => [cell.position, cell]));
  },
  round(column, event) {
    const { base_calls, sampler_calls, partner_calls, commits } = event;
    const stepped = sampler_calls > (column.rounds.at(-1)?.sampler_calls ?? 0); // one token after another
    commits.forEach((commit, n) => Object.assign(column.at.get(commit.position), commit, { pass: base_calls, turn: stepped ? n : 0 }));
    column.rounds.push({ base_calls, sampler_calls, partner_calls, seconds: since(column) });
  },
  row(column, event) {
    const gaps = column.cells.some((cell) => cell.given), tokens = counted(event.completion_tokens, "token");
    column.row = event;
    column.end = gaps ? Infinity : event.completion_tokens;
    column.open = column.cells.filter((cell) => cell.pass).length;
    $("said").textContent = `${column.select.value}: ${tokens}, ${passes(event, "base")}, ${passes(event, "sampler")}, ${event.seconds.toFixed(2)} seconds`;
  },
  end(column, event) {
    column.answer = column.row.text;
    column.nll = event.nll?.[0] ?? null;
  },
  error(_column, event) { throw new Error(event.error.message); },
};

async function run(column, signal) {
  const masks = chosen("kind") === "parts" ? 0 : $("length").valueAsNumber; // until the server has said what is open
  Object.assign(column, { live: true, started: performance.now(), cells: Array.from({ length: masks }, () => ({})) });
  draw(column);
  try {
    const options = { method: "POST", body: JSON.stringify(body(column)), signal };
    for await (const event of events(await ask("v1/canvas", options))) {
      take[event.type]?.(column, event);
      drawSoon(column);
    }
    if (column.answer === null) throw new Error("the stream ended too early");
  } catch (error) {
    column.problem.textContent = signal.aborted ? "stopped" : error.message;
    if (!column.rounds.length) column.cells = [];
  }
  column.live = false;
}

// Drawing ----------------------------------------------------------------------------------------------------------

const shown = (cell) => cell.given || cell.pass <= limit;

// Tokens are pieces of UTF-8: neighbours that share a character are one piece, which is what is shown.
function pieces(column) {
  const out = [], decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  let cells = [];
  const flush = () => {
    const half = decoder.decode();
    if (half) out.push({ cells: cells.length ? cells : out.at(-1).cells, text: half });
    cells = [];
  };
  column.cells.forEach((cell, index) => {
    const behind = index >= column.end;
    if (!shown(cell)) {
      flush();
      out.push({ mask: behind ? "never" : "mask" });
      return;
    }
    if (!cell.text) { // a special token: the end is shown, what was given (the start token) is not
      flush();
      if (!cell.given) out.push({ cells: [cell], text: "\u220e", special: true, behind });
      return;
    }
    cells.push(cell);
    const text = decoder.decode(cell.bytes ? new Uint8Array(cell.bytes) : encoder.encode(cell.text), { stream: true });
    if (text) {
      out.push({ cells, text, behind });
      cells = [];
    }
  });
  flush();
  return out;
}

function spanOf(piece, column, colour, now) {
  const span = document.createElement("span");
  if (piece.mask) {
    span.className = piece.mask;
    return span;
  }
  span.textContent = piece.text.replaceAll("\n", "\u21b5\n");
  const last = piece.cells.reduce((a, b) => ((b.order ?? -1) > (a.order ?? -1) ? b : a));
  span.className = last.given ? "given" : "token";
  if (piece.behind) span.classList.add("behind");
  if (last.given) return span;
  const { order, certainty, pass } = last;
  if (pass === now) {
    span.classList.add("fresh");
    span.style.setProperty("--turn", last.turn);
  }
  const at = colour === "order" ? order / Math.max(1, column.open - 1) : certainty;
  if (at === null) span.classList.add("unknown");
  else span.style.setProperty("--at", at);
  span.title = `commit ${order + 1}, pass ${pass}` + (certainty === null ? "" : `, certainty ${certainty.toFixed(3)}`);
  return span;
}

function draw(column) {
  column.due = false;
  const colour = chosen("colour"), parts = pieces(column);
  const now = column.live ? column.rounds.at(-1)?.base_calls : limit;
  column.canvas.replaceChildren(...parts.map((piece) => spanOf(piece, column, colour, now)));
  const words = parts.filter((part) => !part.special && !part.behind && part.mask !== "never");
  column.plain.textContent = words.map((part) => (part.mask ? "\0" : part.text)).join("").replace(/\0+/g, "\u2026");
  showNumbers(column);
}

// After the pass that is shown; the last round has the server's own seconds, those before it have ours.
function showNumbers(column) {
  const { rounds, row, nll } = column, over = rounds.length && rounds.at(-1).base_calls <= limit;
  const { base_calls, sampler_calls, partner_calls, seconds: then } =
    rounds.findLast((round) => round.base_calls <= limit) ?? { base_calls: 0, sampler_calls: 0, partner_calls: 0, seconds: 0 };
  const seconds = over && row ? row.seconds : column.live ? since(column) : Math.min(then, row?.seconds ?? then);
  const tokens = column.cells.filter((cell, i) => !cell.given && shown(cell) && i < column.end && (row || cell.text)).length;
  const numbers = {
    base_calls: [base_calls], sampler_calls: [sampler_calls], partner_calls: [partner_calls], tokens: [tokens],
    seconds: [seconds, 2], speed: [seconds ? tokens / seconds : null, 1], nll: [over ? nll : null, 2],
  };
  for (const [name, [value, digits]] of Object.entries(numbers)) {
    const dd = column.node.querySelector(`[data-number=${name}]`);
    dd.textContent = column.started === null || value === null ? "\u2013" : value.toFixed(digits);
    if (name === "nll") dd.parentNode.hidden = nll === null;
    if (name === "partner_calls") dd.parentNode.hidden = !rounds.at(-1)?.partner_calls;
  }
}

// The comparison in words.
function showClosing(alone) {
  const done = columns.filter(({ answer }) => answer !== null), many = $("k").valueAsNumber > 1;
  const said = done.map(({ select: { value }, row }) => {
    const about = many ? ABOUT[value]?.[1] ?? "" : "";
    return `${value} wrote ${counted(row.completion_tokens, "token")} in ${passes(row, "base")} and ${row.seconds.toFixed(2)} s${about}.`;
  });
  if (done.length > 1 && !alone) said.push("The columns shared the machine; each is faster alone (More settings).");
  $("closing").textContent = said.join("\n");
}

function drawSoon(column) {
  if (!column.due) requestAnimationFrame(() => draw(column));
  column.due = true;
}

function showColours() {
  const order = chosen("colour") === "order";
  document.body.dataset.colour = chosen("colour");
  [$("low").textContent, $("high").textContent] = order ? ["first", "last"] : ["unsure", "sure"];
  columns.forEach(draw);
}

// Running and looking back -----------------------------------------------------------------------------------------

function setRunning(controller) {
  running = controller;
  const most = Math.max(0, ...columns.map(({ rounds }) => rounds.at(-1)?.base_calls ?? 0));
  $("stop").hidden = !controller;
  $("play").hidden = Boolean(controller);
  $("replay").disabled = $("play").disabled = Boolean(controller) || !most;
  for (const control of [$("start"), $("anew"), $("link"), ...$("examples").children, ...columns.map(({ select }) => select)]) {
    control.disabled = Boolean(controller);
  }
  $("replay").max = most;
  showUpTo(controller ? Infinity : most);
}

function showUpTo(pass) {
  const most = Number($("replay").max);
  limit = pass < most ? pass : Infinity;
  $("replay").value = Math.min(pass, most);
  $("shown").textContent = most && !running ? `pass ${$("replay").value} of ${most}` : "";
  $("replay").setAttribute("aria-valuetext", `after ${$("replay").value} of ${most} base passes`);
  columns.forEach(draw);
}

async function start() {
  stopPlaying();
  if (!model) await meet();
  if (!model) return;
  history.replaceState(null, "", link());
  const controller = new AbortController(), question = chosen("kind") === "chat" ? $("text").value : null;
  const chosenOnes = columns.filter(({ select }) => select.value !== "none"), alone = $("alone").checked;
  for (const column of columns) {
    keepTurn(column);
    if (question === null) column.messages = [];
    else if (chosenOnes.includes(column)) column.question = question;
    clear(column);
  }
  $("problem").textContent = $("closing").textContent = "";
  setRunning(controller);
  if (matchMedia("(max-width: 700px)").matches) $("columns").scrollIntoView();
  const clock = setInterval(() => columns.filter(({ live }) => live).forEach(showNumbers), 100), runs = [];
  for (const column of chosenOnes) {
    runs.push(run(column, controller.signal));
    if (alone) await runs.at(-1);
    if (controller.signal.aborted) break;
  }
  await Promise.all(runs);
  clearInterval(clock);
  setRunning(null);
  showClosing(alone);
  if (question !== null && chosenOnes.every(({ answer }) => answer !== null)) $("text").value = "";
}

function startAnew() {
  for (const column of columns) {
    [column.messages, column.question] = [[], null];
    clear(column);
  }
  setRunning(null);
  $("closing").textContent = "";
  $("text").focus();
}

function stopPlaying() {
  clearInterval(player);
  player = 0;
  $("play").textContent = "Play";
}

function play() {
  if (player) return stopPlaying();
  const most = Number($("replay").max);
  let now = Number($("replay").value) < most ? Number($("replay").value) : 0;
  $("play").textContent = "Pause";
  player = setInterval(() => {
    showUpTo(now);
    if (now++ >= most) stopPlaying();
  }, Math.max(60, Math.min(300, 15000 / Math.max(1, most))));
}

$("ask").addEventListener("submit", (event) => { event.preventDefault(); if (!running) start(); });
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
});
$("stop").addEventListener("click", () => running?.abort());
$("link").addEventListener("click", ({ target }) => {
  history.replaceState(null, "", link());
  copy(target, location.href);
});
$("anew").addEventListener("click", startAnew);
$("key").addEventListener("change", meet);
$("replay").addEventListener("input", () => { stopPlaying(); showUpTo(Number($("replay").value)); });
$("play").addEventListener("click", play);
for (const input of document.querySelectorAll("[name=kind]")) input.addEventListener("change", changeKind);
for (const input of document.querySelectorAll("[name=colour]")) input.addEventListener("change", showColours);
columns = COLUMNS.map(makeColumn);
for (const control of [$("k"), ...columns.map(({ select }) => select)]) control.addEventListener("input", showCaptions);
addEventListener("hashchange", () => { if (model && !running) readLink(); });
showKind();
showColours();
showCaptions();
meet();

// The page of `adjust serve`: asks /v1/canvas once for each column and shows every commit. No framework, no build.
// A canvas is a list of cells, one for each position; a cell is given, or empty until a commit gives it its token.
// Text only ever goes into textContent: what a model writes is never read as HTML.

const $ = (id) => document.getElementById(id);
const COLUMNS = ["joint", "parallel", "adjust"];
const KINDS = {
  messages: ["Question", "The chat template goes around it.", "Write a short story about a dog."],
  prompt: ["Beginning of a text", "May be empty.", "Once upon a time"],
  parts: ["Text with gaps", "{5} is a gap of five tokens. Length does not count here.", "The cat {3} on the mat, and the dog {4}."],
};
const encoder = new TextEncoder();
let model = null; // what /v1/models says
let columns = [];
let running = null; // AbortController of the present run
let limit = Infinity; // commits shown
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
  const { tokens_per_step, temperature, max_tokens } = model.defaults;
  [$("k").value, $("temperature").value, $("length").value] = [tokens_per_step, temperature, max_tokens];
  $("nll").disabled = !model.nll;
  $("nll-missing").hidden = model.nll;
  if (!model.chat) {
    document.querySelector("[name=kind][value=messages]").disabled = true;
    document.querySelector("[name=kind][value=prompt]").checked = true;
    showKind();
  }
  for (const { select } of columns) {
    const before = select.value;
    select.replaceChildren(...[...model.decoders, "none"].map((name) => new Option(name)));
    select.value = model.decoders.includes(before) ? before : "none";
  }
}

// What is asked ----------------------------------------------------------------------------------------------------

const chosen = (name) => document.querySelector(`[name=${name}]:checked`).value;

function body(decoder) {
  const kind = chosen("kind"), text = $("text").value;
  const out = { decoder, temperature: $("temperature").valueAsNumber, seed: $("seed").valueAsNumber };
  if (model.takes_tokens_per_step.includes(decoder)) out.tokens_per_step = $("k").valueAsNumber;
  if ($("nll").checked) out.nll = true;
  if (kind === "parts") {
    const split = text.split(/\{(\d+)\}/);
    out.parts = split.filter((_, i) => i % 2 === 0);
    out.gaps = split.filter((_, i) => i % 2).map(Number);
    return out;
  }
  out.max_tokens = $("length").valueAsNumber;
  if (kind === "messages") out.messages = [{ role: "user", content: text }];
  else if (text) out.prompt = text;
  return out;
}

function showKind() {
  const [label, hint, example] = KINDS[chosen("kind")], text = $("text");
  const untouched = Object.values(KINDS).some((kind) => kind[2] === text.value);
  $("text-label").textContent = label;
  $("hint").textContent = hint;
  $("length").disabled = chosen("kind") === "parts";
  if (untouched) text.value = example;
}

// A column ---------------------------------------------------------------------------------------------------------

function makeColumn(decoder) {
  const node = $("column").content.cloneNode(true).firstElementChild;
  const [select, canvas, plain, problem] = ["select", ".canvas", ".plain", ".problem"].map((s) => node.querySelector(s));
  select.append(new Option(decoder));
  $("columns").append(node);
  return { node, select, canvas, plain, problem, cells: [], open: 0, commits: 0, end: Infinity, over: false, due: false };
}

function clear(column) {
  Object.assign(column, { cells: [], open: 0, commits: 0, end: Infinity, over: false });
  column.problem.textContent = "";
  for (const dd of column.node.querySelectorAll("dd")) dd.textContent = "\u2013";
  number(column, "partner_calls", 0);
  column.node.querySelector("[data-number=nll]").parentNode.hidden = true;
  draw(column);
}

function number(column, name, value, digits = 0) {
  const dd = column.node.querySelector(`[data-number=${name}]`);
  dd.textContent = value === null ? "\u2013" : value.toFixed(digits);
  dd.parentNode.hidden = name === "partner_calls" && !value;
}

const take = {
  start(column, { rows: [row] }) {
    column.cells = [...row.masks.map((position) => ({ position })), ...(row.given ?? []).map((cell) => ({ ...cell, given: true }))];
    column.cells.sort((a, b) => a.position - b.position);
    column.open = row.masks.length;
    column.at = new Map(column.cells.map((cell) => [cell.position, cell]));
  },
  round(column, event) {
    for (const commit of event.commits) Object.assign(column.at.get(commit.position), commit);
    column.commits += event.commits.length;
    number(column, "base_calls", event.base_calls);
    number(column, "sampler_calls", event.sampler_calls);
    number(column, "partner_calls", event.partner_calls);
  },
  row(column, event) {
    column.end = column.cells.some((cell) => cell.given) ? Infinity : event.completion_tokens;
    column.over = true;
    number(column, "tokens", event.completion_tokens);
    number(column, "seconds", event.seconds, 2);
    number(column, "speed", event.completion_tokens / event.seconds, 1);
    const counted = (number, one, more) => `${number} ${number === 1 ? one : more}`;
    const passes = ["base", "sampler"].map((kind) => counted(event[`${kind}_calls`], `${kind} pass`, `${kind} passes`)).join(", ");
    $("said").textContent = `${column.select.value}: ${counted(event.completion_tokens, "token", "tokens")}, ${passes}, ${event.seconds.toFixed(2)} seconds`;
  },
  end(column, event) {
    column.whole = true;
    if (event.nll) number(column, "nll", event.nll[0], 2);
  },
  error(_column, event) { throw new Error(event.error.message); },
};

async function run(column, signal) {
  column.whole = false;
  try {
    const options = { method: "POST", body: JSON.stringify(body(column.select.value)), signal };
    for await (const event of events(await ask("v1/canvas", options))) {
      take[event.type]?.(column, event);
      drawSoon(column);
    }
    if (!column.whole) throw new Error("the stream ended too early");
  } catch (error) {
    column.problem.textContent = signal.aborted ? "stopped" : error.message;
  }
}

// Drawing ----------------------------------------------------------------------------------------------------------

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
    if (!cell.given && !(cell.order < limit)) {
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

function spanOf(piece, column, colour) {
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
  const { order, certainty } = last;
  const at = colour === "order" ? order / Math.max(1, column.open - 1) : certainty;
  if (at === null) span.classList.add("unknown");
  else span.style.setProperty("--at", at);
  span.title = `commit ${order + 1}` + (certainty === null ? "" : `, certainty ${certainty.toFixed(3)}`);
  return span;
}

function draw(column) {
  column.due = false;
  const colour = chosen("colour"), parts = pieces(column);
  column.canvas.replaceChildren(...parts.map((piece) => spanOf(piece, column, colour)));
  const words = parts.filter((part) => !part.special && !part.behind && part.mask !== "never");
  column.plain.textContent = words.map((part) => (part.mask ? "\0" : part.text)).join("").replace(/\0+/g, "\u2026");
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
  const most = Math.max(0, ...columns.map((column) => column.commits));
  $("start").disabled = Boolean(controller);
  $("stop").disabled = !controller;
  $("replay").disabled = $("play").disabled = Boolean(controller) || !most;
  for (const { select } of columns) select.disabled = Boolean(controller);
  $("replay").max = most;
  showUpTo(controller ? Infinity : most);
}

function showUpTo(commits) {
  const most = Number($("replay").max);
  limit = commits < most ? commits : Infinity;
  $("replay").value = Math.min(commits, most);
  $("shown").textContent = most && !running ? `${$("replay").value} of ${most}` : "";
  $("replay").setAttribute("aria-valuetext", `after ${$("replay").value} of ${most} commits`);
  columns.forEach(draw);
}

async function start() {
  stopPlaying();
  if (!model) await meet();
  if (!model) return;
  const controller = new AbortController(), chosenOnes = columns.filter(({ select }) => select.value !== "none");
  columns.forEach(clear);
  setRunning(controller);
  const runs = [];
  for (const column of chosenOnes) {
    runs.push(run(column, controller.signal));
    if (!$("together").checked) await runs.at(-1);
    if (controller.signal.aborted) break;
  }
  await Promise.all(runs);
  setRunning(null);
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
  }, Math.max(40, 6000 / Math.max(1, most)));
}

$("ask").addEventListener("submit", (event) => { event.preventDefault(); if (!running) start(); });
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
});
$("stop").addEventListener("click", () => running?.abort());
$("key").addEventListener("change", meet);
$("replay").addEventListener("input", () => { stopPlaying(); showUpTo(Number($("replay").value)); });
$("play").addEventListener("click", play);
for (const input of document.querySelectorAll("[name=kind]")) input.addEventListener("change", showKind);
for (const input of document.querySelectorAll("[name=colour]")) input.addEventListener("change", showColours);
columns = COLUMNS.map(makeColumn);
showKind();
showColours();
meet();

"use strict";
// Draws timelines on canvases that share one time axis. All numbers are in <script id="timelines">; see page.py.

const data = JSON.parse(document.getElementById("timelines").textContent);
const TYPES = { i1: Int8Array, u1: Uint8Array, i2: Int16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };
const GUTTER = 74;        // pixels left of the lanes, for the ranks' names
const RIGHT = 10;
const FINEST = 40;        // the deepest zoom shows this small a part of the shortest action as the whole width
const $ = (id) => document.getElementById(id);

function unpack({ type, bytes }) {
  const text = atob(bytes), raw = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) raw[i] = text.charCodeAt(i);
  return new TYPES[type](raw.buffer);
}

const darkSystem = matchMedia("(prefers-color-scheme: dark)");
let printing = false;
const dark = () => darkSystem.matches && !printing;
const sans = getComputedStyle(document.documentElement).getPropertyValue("--sans").trim();
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---- the timelines -------------------------------------------------------------------------------------------------

const timelines = data.timelines.map((given) => {
  const t = { ...given };
  for (const [name, column] of Object.entries(given.columns)) t[name] = unpack(column);
  t.lanes = t.offset.length - 1;
  t.byMicrobatch = new Map();       // rows of each micro-batch, for tracing it through the stages
  for (let row = 0; row < t.microbatch.length; row++) {
    const m = t.microbatch[row];
    if (m < 0) continue;
    if (!t.byMicrobatch.has(m)) t.byMicrobatch.set(m, []);
    t.byMicrobatch.get(m).push(row);
  }
  t.laneOf = new Int32Array(t.op.length);
  for (let lane = 0; lane < t.lanes; lane++) t.laneOf.fill(lane, t.offset[lane], t.offset[lane + 1]);
  t.digits = String(t.microbatch.reduce((most, m) => Math.max(most, m), 0)).length
    + (t.part.some((part) => part >= 0) ? 2 : 0);
  t.bar = Math.max(3, Math.min(26, Math.floor(560 / t.lanes)));              // height of the actions of a lane
  t.strip = t.bar >= 8 ? Math.max(5, Math.round(t.bar * 0.5)) : 0;            // and of what is alive below them
  t.gap = t.bar >= 14 ? 6 : t.bar >= 6 ? 2 : 1;
  return t;
});
const whole = { from: 0, to: Math.max(...timelines.map((t) => t.span)) };
const shortest = Math.min(...timelines.map((t) => t.shortest).filter((x) => x > 0), whole.to);
const view = { from: whole.from, to: whole.to };
const shown = { strips: true, numbers: true };
let at = null;                       // the action under the pointer or the keyboard: { t, row }

const laneHeight = (t) => t.bar + (shown.strips ? t.strip : 0) + t.gap;
const widthOf = (canvas) => canvas.clientWidth - GUTTER - RIGHT;
const toX = (canvas, time) => GUTTER + ((time - view.from) / (view.to - view.from)) * widthOf(canvas);
const toTime = (canvas, x) => view.from + ((x - GUTTER) / widthOf(canvas)) * (view.to - view.from);

/** Where a row is in its lane: [from the top, height]; two that are computed at once share it. */
function place(t, row) {
  const half = t.half[row];
  return half === 0 ? [0, t.bar] : [half === 1 ? 0 : t.bar / 2, t.bar / 2];
}

/** The first number from `low` to `high` for which `found` holds, as it does for all after it. */
function search(low, high, found) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (found(middle)) high = middle; else low = middle + 1;
  }
  return low;
}

/** The first row of a lane that ends after a time. */
const firstAfter = (t, lane, time) =>
  search(t.offset[lane], t.offset[lane + 1], (row) => t.start[row] + t.length[row] > time);

/** The first change of what is alive on a lane after a time. */
const changeAfter = (t, lane, time) =>
  search(t.liveOffset[lane], t.liveOffset[lane + 1], (i) => t.liveTime[i] > time);

/** How much is alive on a lane at a time. */
function aliveAt(t, lane, time) {
  const next = changeAfter(t, lane, time);
  return next > t.liveOffset[lane] ? t.liveValue[next - 1] : 0;
}

// ---- numbers as text -----------------------------------------------------------------------------------------------

function unitFor(time) {
  if (!data.seconds) return [1, "T"];
  return time >= 1 ? [1, "s"] : time >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
}
const digits = (x, n = 4) => Number(x.toPrecision(n)).toLocaleString("en", { maximumFractionDigits: 6, useGrouping: false });
function duration(time) {
  const [factor, unit] = unitFor(Math.abs(time));
  return `${digits(time * factor)} ${unit}`;
}
function amount(t, value) {
  if (!t.bytes) return `${digits(value)} activation${value === 1 ? "" : "s"}`;
  let power = 0;
  while (Math.abs(value) >= 1000 && power < 4) { value /= 1000; power++; }
  return `${digits(value, 3)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}
function ticks(from, to, most) {
  let step = 10 ** Math.floor(Math.log10((to - from) / most));
  step *= [1, 2, 5, 10].find((k) => (to - from) / (step * k) <= most);
  const found = [];
  for (let k = Math.ceil(from / step - 1e-9); k * step <= to + step * 1e-9; k++) found.push(k * step);
  return found;
}

// ---- drawing -------------------------------------------------------------------------------------------------------

function prepare(canvas, height) {
  const scale = printing ? 2 : window.devicePixelRatio || 1, width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

function drawAxis() {
  const canvas = $("axis"), pen = prepare(canvas, 34), width = canvas.clientWidth;
  pen.font = `11px ${sans}`;
  const [factor, unit] = unitFor(view.to - view.from > 0 ? Math.max(view.to - view.from, view.to * 1e-4) : 1);
  const marks = ticks(view.from, view.to, Math.max(2, widthOf(canvas) / 90));
  pen.textAlign = "center";
  for (const mark of marks) {
    const x = toX(canvas, mark);
    pen.fillStyle = css("--line");
    pen.fillRect(Math.round(x), 20, 1, 8);
    pen.fillStyle = css("--soft");
    pen.fillText(digits(mark * factor, 6), Math.min(x, width - RIGHT - 8), 15);
  }
  pen.textAlign = "left";
  pen.fillStyle = css("--faint");
  pen.fillText(data.seconds ? unit : data.unit, 0, 15);
  pen.fillStyle = css("--line");                       // which part of the whole is shown
  pen.fillRect(GUTTER, 28, widthOf(canvas), 3);
  const part = (time) => GUTTER + ((time - whole.from) / (whole.to - whole.from)) * widthOf(canvas);
  if (view.from > whole.from || view.to < whole.to) {
    pen.fillStyle = css("--accent");
    pen.fillRect(part(view.from), 28, Math.max(3, part(view.to) - part(view.from)), 3);
  }
  if (selecting) {
    pen.fillStyle = css("--accent");
    pen.globalAlpha = 0.22;
    pen.fillRect(Math.min(selecting.from, selecting.to), 0, Math.abs(selecting.to - selecting.from), 31);
    pen.globalAlpha = 1;
  }
}

function drawTimeline(t) {
  const canvas = t.canvas, height = t.lanes * laneHeight(t) + 2, pen = prepare(canvas, height);
  if (t.kept) {                                        // only the chosen action has changed
    pen.drawImage(t.kept, 0, 0, canvas.clientWidth, height);
    clipped(t, pen, height, () => drawTrace(t, pen));
    return;
  }
  const width = widthOf(canvas), perPixel = (view.to - view.from) / width;
  const colours = data.paints.map((paint) => (dark() ? paint.dark : paint.light));
  const inks = data.paints.map((paint) => (dark() ? paint.darkInk : paint.lightInk));
  const lane = css("--lane"), soft = css("--soft"), live = css("--live"), line = css("--line");
  const marks = ticks(view.from, view.to, Math.max(2, width / 90));
  const labelEvery = Math.ceil(13 / laneHeight(t));
  pen.font = `11px ${sans}`;
  for (let rank = 0; rank < t.lanes; rank++) {
    const y = rank * laneHeight(t);
    pen.fillStyle = lane;
    pen.fillRect(GUTTER, y, width, t.bar);
    if (rank % labelEvery === 0) {
      pen.fillStyle = soft;
      pen.textAlign = "left";
      pen.textBaseline = "middle";
      pen.fillText(`${t.lane} ${rank}`, 0, y + t.bar / 2 + 0.5);
    }
  }
  pen.fillStyle = line;
  for (const mark of marks) pen.fillRect(Math.round(toX(canvas, mark)), 0, 1, height);

  clipped(t, pen, height, () => {
    for (let rank = 0; rank < t.lanes; rank++) {
      const y = rank * laneHeight(t);
      drawActions(t, rank, y, pen, perPixel, colours, inks);
      if (shown.strips && t.strip) drawLive(t, rank, y + t.bar, pen, live);
    }
  });
  t.kept = document.createElement("canvas");
  t.kept.width = canvas.width;
  t.kept.height = canvas.height;
  if (canvas.width && canvas.height) t.kept.getContext("2d").drawImage(canvas, 0, 0);
  clipped(t, pen, height, () => drawTrace(t, pen));
}

function clipped(t, pen, height, draw) {
  pen.save();
  pen.beginPath();
  pen.rect(GUTTER, 0, widthOf(t.canvas), height);
  pen.clip();
  draw();
  pen.restore();
}

/** Actions of one lane. Those below half a pixel are gathered by pixel and drawn in the colour that fills it most. */
function drawActions(t, rank, y, pen, perPixel, colours, inks) {
  const canvas = t.canvas, last = t.offset[rank + 1];
  const numbers = shown.numbers && t.bar >= 10;
  let pixel = -1, covered = new Map();
  const flush = () => {
    if (!covered.size) return;
    let total = 0, most = null;
    for (const [paint, time] of covered) { total += time; if (most === null || time > covered.get(most)) most = paint; }
    pen.globalAlpha = Math.min(1, total / perPixel);
    pen.fillStyle = colours[most];
    pen.fillRect(pixel, y, 1, t.bar);
    pen.globalAlpha = 1;
    covered = new Map();
  };
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  for (let row = firstAfter(t, rank, view.from); row < last && t.start[row] < view.to; row++) {
    const x = toX(canvas, t.start[row]), w = t.length[row] / perPixel;
    if (w < 0.5) {
      if (Math.floor(x) !== pixel) { flush(); pixel = Math.floor(x); }
      covered.set(t.paint[row], (covered.get(t.paint[row]) || 0) + t.length[row]);
      continue;
    }
    flush();
    pixel = -1;
    const seam = w >= 4 ? 0.75 : w >= 2 ? 0.4 : 0;     // a gap between neighbours of one colour
    pen.fillStyle = colours[t.paint[row]];
    const [down, height] = place(t, row);
    pen.fillRect(x, y + down, w - seam, height);
    if (numbers && w >= 7 && height >= 9 && t.microbatch[row] >= 0) number(t, row, pen, x, w, y + down, height, inks);
  }
  flush();
}

/** The micro-batch on an action that is wide enough for the longest of them, so that equals are labelled alike. */
function number(t, row, pen, x, w, y, height, inks) {
  const left = Math.max(x, GUTTER), visible = Math.min(x + w, GUTTER + widthOf(t.canvas)) - left;
  const text = `${t.microbatch[row]}` + (t.part[row] >= 0 ? `.${t.part[row]}` : "");
  const letter = visible >= 24 + 7 * t.digits && height >= 12 ? `${data.names[t.op[row]].letter} ` : "";
  const size = visible >= 7 * t.digits + 3 && height >= 12 ? 11 : 9;
  if (visible < 5.6 * t.digits + 1) return;
  pen.font = `${size}px ${sans}`;
  pen.fillStyle = inks[t.paint[row]];
  pen.fillText(letter + text, left + visible / 2, y + height / 2 + 0.5);
}

/** What is alive on one lane, as a filled step curve below its actions; all lanes have one scale. */
function drawLive(t, rank, y, pen, colour) {
  const canvas = t.canvas, first = t.liveOffset[rank], last = t.liveOffset[rank + 1], base = y + t.strip;
  if (first === last || !t.peak) return;
  const heightOf = (value) => (value / t.peak) * (t.strip - 1);
  let value = aliveAt(t, rank, view.from), x = GUTTER;
  const outline = new Path2D();
  outline.moveTo(x, base - heightOf(value));
  let column = -1, highest = 0;
  for (let i = changeAfter(t, rank, view.from); i < last && t.liveTime[i] < view.to; i++) {
    x = toX(canvas, t.liveTime[i]);
    if (Math.floor(x * 2) === column) {               // several changes in half a pixel: the highest is drawn
      if (t.liveValue[i] > highest) { highest = t.liveValue[i]; outline.lineTo(x, base - heightOf(highest)); }
      value = t.liveValue[i];
      continue;
    }
    outline.lineTo(x, base - heightOf(value));
    value = t.liveValue[i];
    outline.lineTo(x, base - heightOf(value));
    column = Math.floor(x * 2);
    highest = value;
  }
  const end = Math.min(toX(canvas, Math.min(t.span, view.to)), GUTTER + widthOf(canvas));
  outline.lineTo(end, base - heightOf(value));
  const area = new Path2D(outline);
  area.lineTo(end, base);
  area.lineTo(GUTTER, base);
  pen.fillStyle = colour;
  pen.globalAlpha = 0.3;
  pen.fill(area);
  pen.globalAlpha = 0.85;
  pen.strokeStyle = colour;
  pen.lineWidth = 1;
  pen.stroke(outline);
  pen.globalAlpha = 1;
}

/** The micro-batch of the chosen action through all its stages: others fade, its messages are lines. */
function drawTrace(t, pen) {
  if (!at || at.t !== t) return;
  const canvas = t.canvas, chosen = t.microbatch[at.row];
  const rows = chosen >= 0 ? t.byMicrobatch.get(chosen) : [at.row];
  const ink = css("--ink"), y = (row) => t.laneOf[row] * laneHeight(t);
  pen.lineWidth = 1.25;
  pen.strokeStyle = ink;
  const wanted = new Set(rows);
  pen.globalAlpha = 0.8;
  for (let i = 0; i < t.producer.length; i++) {
    if (!wanted.has(t.producer[i])) continue;
    const from = t.producer[i], to = t.consumer[i];
    const down = t.laneOf[to] > t.laneOf[from];
    pen.beginPath();
    pen.moveTo(toX(canvas, t.start[from] + t.length[from]), y(from) + (down ? t.bar : 0));
    pen.lineTo(toX(canvas, t.start[to]), y(to) + (down ? 0 : t.bar));
    pen.stroke();
  }
  pen.globalAlpha = 1;
  for (const row of rows) {
    const x = toX(canvas, t.start[row]), w = Math.max(2, (t.length[row] / (view.to - view.from)) * widthOf(canvas));
    pen.lineWidth = row === at.row ? 2.5 : 1.25;
    const [down, height] = place(t, row);
    pen.strokeRect(x + 0.5, y(row) + down + 0.5, Math.max(1, w - 1.5), height - 1);
  }
}

let queued = false;
function redraw() {
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => { queued = false; drawNow(); });
}
/** All must be drawn anew: what is shown, its size or its colours have changed. */
function forget() {
  for (const t of timelines) t.kept = null;
  redraw();
}
function drawNow() {
  drawAxis();
  for (const t of timelines) {
    const box = t.canvas.getBoundingClientRect();
    if (printing || !t.canvas.style.height || (box.bottom > -200 && box.top < innerHeight + 200)) drawTimeline(t);
  }
}

// ---- zoom and pan --------------------------------------------------------------------------------------------------

function show(from, to) {
  const least = Math.max(shortest / FINEST, (whole.to - whole.from) * 1e-9);
  const length = Math.min(Math.max(to - from, least), whole.to - whole.from);
  view.from = Math.min(Math.max((from + to - length) / 2, whole.from), whole.to - length);
  view.to = view.from + length;
  forget();
}
function zoom(factor, around = (view.from + view.to) / 2) {
  show(around - (around - view.from) * factor, around + (view.to - around) * factor);
}
const pan = (part) => show(view.from + part * (view.to - view.from), view.to + part * (view.to - view.from));
const reset = () => show(whole.from, whole.to);

let hinted = 0;
function onWheel(event, canvas, always) {
  const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
  const fits = document.documentElement.scrollHeight <= innerHeight + 2;
  if (sideways || event.shiftKey) {
    event.preventDefault();
    pan((sideways ? event.deltaX : event.deltaY) / widthOf(canvas));
  } else if (always || fits || event.ctrlKey || event.metaKey) {
    event.preventDefault();
    const turned = event.deltaY * (event.deltaMode === 1 ? 16 : 1) * (event.ctrlKey && Math.abs(event.deltaY) < 40 ? 4 : 1);
    zoom(Math.exp(turned * 0.0016), toTime(canvas, event.clientX - canvas.getBoundingClientRect().left));
  } else if (Date.now() - hinted > 4000) {
    hinted = Date.now();
    $("hint").classList.add("shown");
    setTimeout(() => $("hint").classList.remove("shown"), 1600);
  }
}

let selecting = null;
const axis = $("axis");
axis.addEventListener("wheel", (event) => onWheel(event, axis, true), { passive: false });
axis.addEventListener("pointerdown", (event) => {
  axis.setPointerCapture(event.pointerId);
  selecting = { from: event.offsetX, to: event.offsetX };
});
axis.addEventListener("pointermove", (event) => { if (selecting) { selecting.to = event.offsetX; redraw(); } });
axis.addEventListener("pointerup", () => {
  if (!selecting) return;
  const [from, to] = [Math.min(selecting.from, selecting.to), Math.max(selecting.from, selecting.to)];
  selecting = null;
  if (to - from > 4) show(toTime(axis, from), toTime(axis, to)); else redraw();
});
axis.addEventListener("pointercancel", () => { selecting = null; redraw(); });
axis.addEventListener("dblclick", reset);

// ---- the card ------------------------------------------------------------------------------------------------------

const SKIPPED = { part: "slice", version: "weights, version" };

function choose(t, row, x, y) {
  at = { t, row };
  const name = data.names[t.op[row]], paint = data.paints[t.paint[row]], rank = t.laneOf[row];
  const before = row > t.offset[rank] ? t.start[row - 1] + t.length[row - 1] : 0;
  const lines = [];
  if (t.microbatch[row] >= 0) lines.push(["micro-batch", t.microbatch[row]]);
  for (const [field, title] of Object.entries(SKIPPED)) if (t[field][row] >= 0) lines.push([title, t[field][row]]);
  if (t.stage[row] >= 0) lines.push(["stage", t.stage[row]]);
  lines.push([t.lane, rank], ["start", duration(t.start[row])], ["length", duration(t.length[row])]);
  if (t.half[row] !== 2 && t.start[row] - before > t.span * 1e-6) lines.push(["idle before", duration(t.start[row] - before)]);
  lines.push(["alive on the rank", amount(t, aliveAt(t, rank, t.start[row] + t.length[row] / 2))]);
  const card = $("card");
  card.replaceChildren();
  const title = document.createElement("b"), mark = document.createElement("i"), list = document.createElement("dl");
  mark.style.background = dark() ? paint.dark : paint.light;
  title.append(mark, name.name);
  for (const [term, value] of lines) {
    const dt = document.createElement("dt"), dd = document.createElement("dd");
    dt.textContent = term;
    dd.textContent = value;
    list.append(dt, dd);
  }
  card.append(title, list);
  const { width, height } = card.getBoundingClientRect();
  card.style.left = `${x + 18 + width > innerWidth ? Math.max(4, x - 18 - width) : x + 18}px`;
  card.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - 18 - height) : y + 18}px`;
  card.style.visibility = "visible";
  redraw();
  return `${t.name}: ${name.name}, ${lines.map((line) => line.join(" ")).join(", ")}`;
}
function leave() {
  if (!at) return;
  at = null;
  $("card").style.visibility = "hidden";
  redraw();
}

function under(t, event) {
  const y = event.offsetY, rank = Math.floor(y / laneHeight(t));
  if (rank < 0 || rank >= t.lanes || event.offsetX < GUTTER || event.offsetX > GUTTER + widthOf(t.canvas)) return -1;
  const time = toTime(t.canvas, event.offsetX), slack = (2 * (view.to - view.from)) / widthOf(t.canvas);
  const row = firstAfter(t, rank, time - slack);
  if (row >= t.offset[rank + 1] || t.start[row] > time + slack) return -1;
  const lower = t.half[row] === 1 && y - rank * laneHeight(t) >= t.bar / 2;
  const next = lower
    || (row + 1 < t.offset[rank + 1] && t.start[row] + t.length[row] <= time && t.start[row + 1] <= time);
  return next ? row + 1 : row;
}

/** Bring a row into view, and say it. */
function visit(t, row) {
  const begin = t.start[row], end = begin + t.length[row], length = view.to - view.from;
  if (begin < view.from || end > view.to) show((begin + end - length) / 2, (begin + end + length) / 2);
  const box = t.canvas.getBoundingClientRect(), y = box.top + (t.laneOf[row] + 0.5) * laneHeight(t);
  if (y < 120 || y > innerHeight - 20) scrollBy(0, y - innerHeight / 2);
  const top = t.canvas.getBoundingClientRect().top + (t.laneOf[row] + 0.5) * laneHeight(t);
  $("spoken").textContent = choose(t, row, box.left + toX(t.canvas, (begin + end) / 2), top);
}

function keyboard(t, event) {
  const row = at && at.t === t ? at.row : -1, rank = row < 0 ? 0 : t.laneOf[row];
  const beside = (other) => {
    if (row < 0) return visit(t, firstRow(t, 0));
    if (other < 0 || other >= t.lanes || t.offset[other] === t.offset[other + 1]) return undefined;
    return visit(t, Math.min(firstAfter(t, other, t.start[row] + t.length[row] / 2), t.offset[other + 1] - 1));
  };
  const keys = {
    ArrowRight: () => visit(t, row < 0 ? firstRow(t, 0) : Math.min(row + 1, t.offset[rank + 1] - 1)),
    ArrowLeft: () => visit(t, row < 0 ? firstRow(t, 0) : Math.max(row - 1, t.offset[rank])),
    ArrowDown: () => beside(rank + 1),
    ArrowUp: () => beside(rank - 1),
    "+": () => zoom(0.6, row < 0 ? undefined : t.start[row] + t.length[row] / 2),
    "=": () => zoom(0.6, row < 0 ? undefined : t.start[row] + t.length[row] / 2),
    "-": () => zoom(1 / 0.6),
    "0": reset, Home: reset,
    a: () => pan(-0.2), d: () => pan(0.2), w: () => zoom(0.6), s: () => zoom(1 / 0.6),
    Escape: leave,
  };
  if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
  event.preventDefault();
  keys[event.key]();
}
const firstRow = (t, rank) => Math.min(firstAfter(t, rank, view.from), t.offset[rank + 1] - 1);

// ---- the page ------------------------------------------------------------------------------------------------------

for (const [i, t] of timelines.entries()) {
  t.canvas = $(`timeline-${i}`);
  const canvas = t.canvas;
  let drag = null;
  canvas.addEventListener("wheel", (event) => { leave(); onWheel(event, canvas, false); }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch" && !event.isPrimary) return;
    canvas.setPointerCapture(event.pointerId);
    drag = { x: event.offsetX, from: view.from, to: view.to };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag && Math.abs(event.offsetX - drag.x) > 3) {
      canvas.classList.add("dragging");
      leave();
      const moved = ((drag.x - event.offsetX) / widthOf(canvas)) * (drag.to - drag.from);
      show(drag.from + moved, drag.to + moved);
      return;
    }
    const row = under(t, event);
    if (row < 0) leave(); else choose(t, row, event.clientX, event.clientY);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, () => { drag = null; canvas.classList.remove("dragging"); });
  }
  canvas.addEventListener("pointerleave", () => { if (!drag) leave(); });
  canvas.addEventListener("dblclick", (event) => zoom(0.4, toTime(canvas, event.offsetX)));
  canvas.addEventListener("blur", leave);
  canvas.addEventListener("keydown", (event) => keyboard(t, event));
}
$("in").onclick = () => zoom(0.5);
$("out").onclick = () => zoom(2);
$("all").onclick = reset;
for (const name of ["strips", "numbers"]) {
  $(name).onclick = () => {
    shown[name] = !shown[name];
    $(name).setAttribute("aria-pressed", String(shown[name]));
    forget();
  };
}
function swatches() {
  for (const mark of document.querySelectorAll(".legend i[data-light]")) {
    mark.style.background = dark() ? mark.dataset.dark : mark.dataset.light;
  }
}
function everything() {
  swatches();
  for (const t of timelines) t.kept = null;
  drawNow();
}
darkSystem.addEventListener("change", everything);
addEventListener("resize", forget);
addEventListener("scroll", redraw, { passive: true });
addEventListener("beforeprint", () => { printing = true; leave(); everything(); });
addEventListener("afterprint", () => { printing = false; everything(); });
everything();

// Parts of the panels that move or plot: playback, charts on axes, tables, packed columns.
import { axes, button, colour, h, legend, linearScale, logScale, s } from "lab/kit";

/** Numbers from `low` to `high` in equal steps. */
export function range(low, high, step = 1) {
  return Array.from({ length: Math.round((high - low) / step) + 1 }, (_, i) => Number((low + i * step).toPrecision(9)));
}

/** Numbers from `low` to `high` in equal factors, `each` of them to a factor of ten, with three digits. */
export function powersOfTen(low, high, each) {
  const from = Math.log10(low), count = Math.round((Math.log10(high) - from) * each);
  return Array.from({ length: count + 1 }, (_, i) => Number((10 ** (from + i / each)).toPrecision(3)));
}

/** A number with three digits. */
export function number(value, digits = 3) {
  if (value === 0 || !Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(digits - 1).replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

/** A table of text or elements; the row `best` is emphasised. */
export function table(headings, rows, { best = -1, words = [] } = {}) {
  const kind = (i) => ({ class: words.includes(i) ? "words" : undefined });
  return h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, headings.map((heading, i) => h("th", { scope: "col", ...kind(i) }, heading)))),
    h("tbody", {}, rows.map((row, i) => h("tr", { class: i === best ? "best" : undefined }, row.map((cell, k) => h("td", kind(k), cell)))))));
}

// ---- playback ------------------------------------------------------------------------------------------------------

/**
 * Play, pause, step and a slider for the time.
 *   advance(seconds)  moves on; returns whether there is more
 *   rewind()          called before playing from the end; `atEnd()` says whether it is there
 *   step(direction)   goes to the next moment or to the one before
 *   seek(part)        goes to a part, 0 to 1, of the whole
 */
export function playback({ advance, rewind, atEnd, step, seek, label }) {
  let running = false, last = 0;
  const play = button("Play", () => (running ? pause() : start()), { class: "main" });
  const back = button("◂ Back", () => { pause(); step(-1); });
  const forth = button("Step ▸", () => { pause(); step(1); });
  const scrub = h("input", { type: "range", min: 0, max: 1, step: 0.001, "aria-label": label, oninput: () => { pause(); seek(scrub.valueAsNumber); } });
  const clock = h("output", { class: "clock" });
  function tick(now) {
    if (!running) return;
    const seconds = Math.min(0.1, (now - last) / 1000);
    last = now;
    if (advance(seconds)) requestAnimationFrame(tick); else pause();
  }
  function start() {
    if (atEnd()) rewind();
    running = true;
    last = performance.now();
    play.textContent = "Pause";
    requestAnimationFrame(tick);
  }
  function pause() {
    running = false;
    play.textContent = "Play";
  }
  return {
    element: h("div", { class: "row playback" }, play, back, forth, scrub, clock), pause,
    set(part, text) {
      scrub.value = part;
      scrub.setAttribute("aria-valuetext", text);
      clock.textContent = text;
    },
    enable(on) { for (const each of [play, back, forth, scrub]) each.disabled = !on; },
  };
}

// ---- packed columns ------------------------------------------------------------------------------------------------

const TYPES = { i1: Int8Array, i2: Int16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };

/** Read a column that `shoal.report.page.pack_column` wrote. */
export function unpack({ type, bytes }) {
  const text = atob(bytes), raw = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) raw[i] = text.charCodeAt(i);
  return new TYPES[type](raw.buffer);
}

// ---- charts --------------------------------------------------------------------------------------------------------

/** Colours for a canvas, and whether the page is dark. */
export function canvasColours() {
  const found = Object.fromEntries(["ground", "raised", "lane", "ink", "soft", "faint", "line", "accent"].map((name) => [name, colour(`--${name}`)]));
  const [red, green, blue] = found.ground.match(/[\d.]+/g).map(Number);
  const dark = 0.2126 * red + 0.7152 * green + 0.0722 * blue < (found.ground.startsWith("color(") ? 0.5 : 128);
  return { ...found, dark };
}

/**
 * A chart as wide as its place. `describe()` returns null or
 *   {x: {low, high, log, label, show}, y: the same, height, ratio, named,
 *    series: [{name, colour, points, dash, wide, dots}], bars: [{from, to, y, colour, words}],
 *    bands: [{from, to, colour, words}], marks: [{x, y, words}], labels: [[y, words]], under(group, X, Y)}.
 */
export function plot(describe, label) {
  const host = h("figure", { class: "plot", role: "img", "aria-label": label });
  function draw() {
    const width = host.clientWidth, given = width ? describe() : null;
    if (!width) return;
    const named = (given?.series ?? []).filter((each) => each.name);
    host.replaceChildren(...(given ? [drawPlot(given, width), ...(named.length > 1 ? [legend(named)] : [])] : []));
  }
  new ResizeObserver(draw).observe(host);
  return { element: host, draw };
}

let clips = 0;

function drawPlot(given, width) {
  const height = given.height ?? Math.round(width * given.ratio), margin = { left: given.left ?? 54, right: 12, top: 22, bottom: 38 };
  const scale = ({ low, high, log }, ends) => (log ? logScale : linearScale)([low, high], ends);
  const X = scale(given.x, [margin.left, width - margin.right]), Y = scale(given.y, [height - margin.bottom, margin.top]);
  thin(X, Math.max(2, Math.floor(width / 84)));
  thin(Y, Math.max(2, Math.floor(height / 46)));
  const axis = (each, of) => ({ scale: of, format: (value) => (each.show ?? ((plain) => number(plain)))(value || 0), label: each.label });
  const id = `plot-${clips++}`, right = width - margin.right, bottom = height - margin.bottom;
  const inside = s("g", { "clip-path": `url(#${id})` });
  for (const band of given.bands ?? []) {
    const from = X(Math.max(band.from, given.x.low)), to = X(Math.min(band.to, given.x.high));
    if (to <= from) continue;
    inside.append(s("rect", { x: from, y: margin.top, width: to - from, height: bottom - margin.top, style: { fill: band.colour } }),
      s("text", { class: "note", x: (from + to) / 2, y: margin.top + 14, "text-anchor": "middle" }, to - from > 7 * band.words.length ? band.words : ""));
  }
  given.under?.(inside, X, Y);
  for (const bar of given.bars ?? []) {
    const from = X(bar.from), wide = Math.max(0.5, X(bar.to) - from - 1);
    inside.append(s("rect", { x: from, y: Y(bar.y), width: wide, height: Math.max(0, bottom - Y(bar.y)), style: { fill: bar.colour } }, s("title", {}, bar.words)));
  }
  for (const each of given.series ?? []) {
    const points = each.points.filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y)).map(([x, y]) => [X(x), Y(y)]);
    inside.append(s("path", {
      d: points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join(""), "stroke-dasharray": each.dash,
      style: { fill: "none", stroke: each.colour, "stroke-width": each.wide ? "2.8px" : "1.6px", "stroke-linejoin": "round" },
    }, s("title", {}, each.name ?? "")));
    if (each.dots) inside.append(...points.map(([cx, cy]) => s("circle", { cx, cy, r: each.dots, style: { fill: each.colour } })));
  }
  const marks = (given.marks ?? []).map((mark, i) => {
    const end = X(mark.x) > width - 150;
    return s("g", { class: "mark" }, s("circle", { cx: X(mark.x), cy: Y(mark.y), r: 4 }),
      s("text", { x: X(mark.x) + (end ? -8 : 8), y: Y(mark.y) + (i % 2 ? 17 : -9), "text-anchor": end ? "end" : "start" }, mark.words));
  });
  return s("svg", { viewBox: `0 0 ${width} ${height}` },
    s("clipPath", { id }, s("rect", { x: margin.left, y: margin.top, width: Math.max(0, right - margin.left), height: Math.max(0, bottom - margin.top) })),
    axes({ x: axis(given.x, X), y: axis(given.y, Y), width, height, margin }), inside, marks,
    (given.labels ?? []).map(([y, words]) => s("text", { class: "tick", x: margin.left - 7, y: Y(y) + 4, "text-anchor": "end" }, words)));
}

/** Leave at most `most` ticks on a scale. */
function thin(scale, most) {
  const all = scale.ticks;
  scale.ticks = () => {
    const found = all(most), every = Math.ceil(found.length / most);
    return found.filter((_, i) => i % every === 0);
  };
}

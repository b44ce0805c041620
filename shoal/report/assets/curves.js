"use strict";
// Draws the curves of runs from <script id="runs">, and on a live page asks for new ones; see curves.py and watch.py.

(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const HEIGHT = 210, LEFT = 54, RIGHT = 12, TOP = 18, BOTTOM = 22;
  const COLOURS = 8;
  const WAIT = 2000;                // ms between requests of a live page
  const GLYPHS = { restart: "↻", layout: "◇", spike: "▲" };
  const MEANING = { restart: "restart or rollback", layout: "change of the layout", spike: "spike" };
  const $ = (id) => document.getElementById(id);

  let { live, runs } = JSON.parse($("runs").textContent);
  const hidden = new Set();         // names of runs
  const options = { logValues: false, logSteps: false, smoothing: 0 };
  const figures = new Map();        // by key: { root, caption, reading, host, draw, at }

  const colour = (run) => `var(--run-${runs.indexOf(run) % COLOURS})`;
  const shown = () => runs.filter((run) => !hidden.has(run.name));

  function fill(made, attributes = {}, parent = null, text = "") {
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }
  const element = (name, ...rest) => fill(document.createElementNS(SVG, name), ...rest);
  const html = (name, ...rest) => fill(document.createElement(name), ...rest);

  // ---- numbers -----------------------------------------------------------------------------------------------------

  function show(value) {
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (size >= 1e4) return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 }).format(value);
    return String(Number(value.toPrecision(4)));
  }

  /** An exponential mean over points, without the pull of the start towards 0. */
  function smooth(points, weight) {
    let mean = 0, total = 0;
    return points.map(([x, y]) => {
      mean = weight * mean + (1 - weight) * y;
      total = weight * total + (1 - weight);
      return [x, mean / total];
    });
  }

  function ticks(low, high, logarithmic, most) {
    if (logarithmic) {
      const found = [], from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
      const every = Math.max(1, Math.ceil((to - from) / most));
      const parts = high < 10 * low ? [1, 1.5, 2, 3, 5, 7] : to - from <= 2 ? [1, 2, 5] : [1];
      for (let power = from; power <= to; power += every) found.push(...parts.map((part) => part * 10 ** power));
      return found.filter((value) => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9));
    }
    const raw = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((part) => part * power).find((value) => value >= raw);
    const found = [];
    for (let i = Math.ceil(low / step); i * step <= high * (1 + 1e-12); i++) found.push(i * step);
    return found;
  }

  /** A function from values to pixels; the range is widened where it is a single value. */
  function scale(values, from, to, { logarithmic, zero }) {
    let low = Math.min(...values), high = Math.max(...values);
    if (logarithmic) {
      if (low === high) [low, high] = [low / 1.5, high * 1.5];
      const a = Math.log(low), b = Math.log(high);
      return { low, high, at: (value) => from + (Math.log(value) - a) / (b - a) * (to - from) };
    }
    if (zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
    if (low === high) [low, high] = [low - Math.abs(low || 1) / 2, high + Math.abs(high || 1) / 2];
    return { low, high, at: (value) => from + (value - low) / (high - low) * (to - from) };
  }

  // ---- one figure --------------------------------------------------------------------------------------------------

  /** What a figure shows: for each run its lines, without the points that a logarithmic axis has not. */
  function collect(key) {
    const found = [];
    for (const run of shown()) {
      const given = run.figures.find((figure) => figure.key === key);
      if (!given) continue;
      const logY = given.log && options.logValues, logX = !given.ranks && options.logSteps;
      const can = ([x, y]) => (!logX || x > 0) && (!logY || y > 0);
      const line = (given.line || given.ranks || []).filter(can);
      const smoothed = given.line && options.smoothing ? smooth(line, options.smoothing) : null;
      found.push({ run, given, line, smoothed, dots: (given.dots || []).filter(can), logX, logY });
    }
    return found;
  }

  function path(points, x, y) {
    return points.map(([a, b], i) => `${i ? "L" : "M"}${x.at(a).toFixed(1)} ${y.at(b).toFixed(1)}`).join("");
  }

  function draw(key) {
    const figure = figures.get(key), drawn = collect(key), width = Math.max(220, figure.host.clientWidth);
    const focused = figure.host.contains(document.activeElement);
    figure.host.replaceChildren();
    figure.points = [];
    const all = drawn.flatMap((one) => [...one.line, ...one.dots]);
    if (!all.length) {
      html("p", { class: "note" }, figure.host, "No values on these axes.");
      return;
    }
    const { given, logX, logY } = drawn[0];
    const svg = element("svg", {
      viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", tabindex: "0",
      "aria-label": `${given.title}${given.ranks ? "" : " by step"}. Arrow keys move between values.`,
    }, figure.host);
    const along = given.ranks ? [-0.5, ...all.map((p) => p[0] + 0.5)] : all.map((p) => p[0]);
    const x = scale(along, LEFT, width - RIGHT, { logarithmic: logX, zero: false });
    const y = scale(all.map((p) => p[1]), HEIGHT - BOTTOM, TOP, { logarithmic: logY, zero: !given.log });
    for (const value of ticks(y.low, y.high, logY, 4)) {
      element("line", { x1: LEFT, x2: width - RIGHT, y1: y.at(value), y2: y.at(value), stroke: "var(--line)" }, svg);
      element("text", { x: LEFT - 6, y: y.at(value) + 4, "text-anchor": "end" }, svg, show(value));
    }
    element("text", { x: LEFT - 6, y: HEIGHT - 6, "text-anchor": "end" }, svg, given.ranks ? "rank" : "step");
    for (const value of ticks(x.low, x.high, logX, Math.max(3, Math.floor(width / 80)))) {
      if (Number.isInteger(value))
        element("text", { x: x.at(value), y: HEIGHT - 6, "text-anchor": "middle" }, svg, show(value));
    }
    for (const one of drawn) {
      if (!given.ranks) mark(svg, one.run, x, drawn.length > 1 || runs.length > 1);
      const stroke = colour(one.run), faint = one.smoothed ? 0.28 : 1;
      const alone = one.line.length === 1;
      if (given.ranks) {
        const wide = Math.max(1.5, Math.min(14, (width - LEFT - RIGHT) / one.line.length / drawn.length - 1));
        one.line.forEach(([rank, value]) => element("rect", {
          x: x.at(rank) - wide * drawn.length / 2 + wide * drawn.indexOf(one), width: wide, y: y.at(value),
          height: Math.max(0, y.at(0) - y.at(value)), fill: stroke,
        }, svg));
      } else if (alone) {
        element("circle", { cx: x.at(one.line[0][0]), cy: y.at(one.line[0][1]), r: 3, fill: stroke }, svg);
      } else {
        element("path", { d: path(one.line, x, y), fill: "none", stroke, "stroke-width": 1.6, opacity: faint }, svg);
        if (one.smoothed)
          element("path", { d: path(one.smoothed, x, y), fill: "none", stroke, "stroke-width": 2, class: "smoothed" }, svg);
      }
      for (const [step, value] of one.dots)
        element("circle", { cx: x.at(step), cy: y.at(value), r: 3.2, fill: "var(--ground)", stroke, "stroke-width": 1.8 }, svg);
    }
    figure.x = x;
    figure.y = y;
    figure.drawn = drawn;
    figure.steps = [...new Set(drawn.flatMap((one) => [...one.line, ...one.dots].map((p) => p[0])))].sort((a, b) => a - b);
    figure.cursor = element("g", {}, svg);
    const toStep = (event) => {
      const box = svg.getBoundingClientRect(), px = (event.clientX - box.left) / box.width * width;
      return figure.steps.reduce((best, step) => Math.abs(x.at(step) - px) < Math.abs(x.at(best) - px) ? step : best);
    };
    svg.addEventListener("pointermove", (event) => point(key, toStep(event)));
    svg.addEventListener("pointerdown", (event) => point(key, toStep(event)));
    svg.addEventListener("pointerleave", () => point(key, null));
    svg.addEventListener("blur", () => point(key, null));
    svg.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      const i = figure.steps.indexOf(figure.at);
      point(key, figure.steps[Math.max(0, Math.min(figure.steps.length - 1, i < 0 ? figure.steps.length - 1 : i + move))]);
    });
    if (focused) svg.focus({ preventScroll: true });
    if (figure.at != null) read(key, figure.at);
  }

  function mark(svg, run, x, several) {
    for (const { step, kind, text } of run.marks) {
      if (step < x.low || step > x.high) continue;
      const stroke = several ? colour(run) : "var(--faint)";
      const group = element("g", { class: `mark ${kind}` }, svg);
      element("title", {}, group, several ? `${run.name}: ${text}` : text);
      element("line", { x1: x.at(step), x2: x.at(step), y1: TOP, y2: HEIGHT - BOTTOM, stroke, "stroke-dasharray": "2 3" }, group);
      element("text", { x: x.at(step), y: TOP - 5, "text-anchor": "middle", style: `fill: ${stroke}` }, group, GLYPHS[kind]);
    }
  }

  /** Point at a step in a figure, and at the same step in all others that have it. */
  function point(key, step) {
    const byRank = figures.get(key).drawn[0].given.ranks;
    for (const [other, figure] of figures) {
      if (!figure.drawn || Boolean(figure.drawn[0]?.given.ranks) !== Boolean(byRank)) continue;
      read(other, step);
    }
  }

  function read(key, step) {
    const figure = figures.get(key);
    figure.at = step;
    figure.cursor?.replaceChildren();
    if (step == null || !figure.steps.includes(step)) {
      figure.reading.textContent = "";
      return;
    }
    const { x, y, drawn } = figure;
    element("line", { x1: x.at(step), x2: x.at(step), y1: TOP, y2: HEIGHT - BOTTOM, stroke: "var(--soft)" }, figure.cursor);
    const words = [], where = `${drawn[0].given.ranks ? "rank" : "step"} ${step}`;
    for (const one of drawn) {
      const values = [one.smoothed, one.line, one.dots].map((points) => points?.find((p) => p[0] === step)?.[1]);
      const [smoothed, value, dot] = values;
      for (const each of values) if (each !== undefined && !one.given.ranks)
        element("circle", { cx: x.at(step), cy: y.at(each), r: 3, fill: colour(one.run) }, figure.cursor);
      const parts = [];
      if (smoothed !== undefined) parts.push(`${show(smoothed)} (${show(value)})`);
      else if (value !== undefined) parts.push(show(value));
      if (dot !== undefined) parts.push(`validation ${show(dot)}`);
      if (parts.length) words.push(`${drawn.length > 1 ? `${one.run.name} ` : ""}${parts.join(", ")}`);
    }
    figure.reading.textContent = `${where}${drawn[0].smoothed ? ", smoothed (value)" : ""}: ${words.join(", ")}`;
  }

  // ---- the page ----------------------------------------------------------------------------------------------------

  /** The figures of the runs that are shown, in order; those that are there stay. */
  function arrange() {
    const titles = new Map();
    for (const run of runs) for (const { key, title } of run.figures) if (!titles.has(key)) titles.set(key, title);
    for (const [key, figure] of figures) {
      if (titles.has(key)) continue;
      figure.root.remove();
      figures.delete(key);
    }
    for (const [key, title] of titles) {
      if (!figures.has(key)) {
        const root = html("figure", { class: "curve" });
        const caption = html("figcaption", {}, root);
        html("span", {}, caption, title);
        const host = html("div", {}, root);
        const reading = html("p", { class: "reading", "aria-live": "polite" }, root);  // below: it may not move the curve
        figures.set(key, { root, reading, host, steps: [], at: null });
      }
      $("curves").append(figures.get(key).root);
    }
    if (!titles.size) $("curves").textContent = "Nothing has been logged yet.";
    else for (const node of [...$("curves").childNodes]) if (node.nodeType === Node.TEXT_NODE) node.remove();
  }

  function list() {
    $("curve-runs").replaceChildren();
    if (runs.length > 1) for (const run of runs) {
      const label = html("label", {}, html("li", {}, $("curve-runs")));
      const box = html("input", { type: "checkbox" }, label);
      box.checked = !hidden.has(run.name);
      box.addEventListener("change", () => {
        hidden[box.checked ? "delete" : "add"](run.name);
        redraw();
      });
      html("i", { style: `background: ${colour(run)}` }, label);
      html("span", {}, label, run.name);
    }
    const kinds = new Set(runs.flatMap((run) => run.marks.map((one) => one.kind)));
    $("curve-marks").replaceChildren(...[...kinds].map((kind) => html("li", {}, null, `${GLYPHS[kind]} ${MEANING[kind]}`)));
  }

  function redraw() {
    for (const key of figures.keys()) draw(key);
  }

  function update() {
    arrange();
    list();
    redraw();
  }

  for (const [id, name] of [["log-values", "logValues"], ["log-steps", "logSteps"]])
    $(id).addEventListener("change", (event) => {
      options[name] = event.target.checked;
      redraw();
    });
  $("smoothing").addEventListener("input", (event) => {
    options.smoothing = Number(event.target.value);
    event.target.nextElementSibling.textContent = options.smoothing || "0";
    redraw();
  });
  let width = 0;
  new ResizeObserver(() => {
    if ($("curves").clientWidth === width) return;
    width = $("curves").clientWidth;
    redraw();
  }).observe($("curves"));
  update();

  // ---- a live page -------------------------------------------------------------------------------------------------

  let last = "";

  async function ask() {
    const begin = performance.now();
    try {
      const answer = await fetch("api/runs", { method: "POST", body: "{}" });
      if (!answer.ok) throw new Error(answer.statusText);
      const text = await answer.text();
      if (text !== last) {
        const found = JSON.parse(text);
        ({ runs } = found);
        for (const id of ["facts", "events"]) $(id).innerHTML = found[id];
        last = text;
        update();
      }
      $("live").className = "";
      $("live").textContent = `updated ${new Date().toLocaleTimeString()}`;
    } catch {
      $("live").className = "lost";
      $("live").textContent = "The server does not answer: these are its last values.";
    }
    setTimeout(ask, Math.max(WAIT, 5 * (performance.now() - begin)));
  }
  if (live) ask();
})();

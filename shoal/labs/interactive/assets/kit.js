// Parts that all panels share: elements, controls, units, charts. No panel parses markup: text is always text.

export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, to] of Object.entries(value)) element.style.setProperty(key, to);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// ---- units ----------------------------------------------------------------------------------------------------------

const PREFIXES = [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3], ["", 1]];

const FORMATS = [0, 1, 2, 3].map((most) => new Intl.NumberFormat("en-US", { maximumFractionDigits: most })); // slow to make

function digits(value) {
  const size = Math.abs(value);
  return FORMATS[size >= 100 ? 0 : size >= 10 ? 1 : 2].format(value);
}

export function metric(value, unit) {
  if (Math.abs(value) >= 1e15) return `${digits(value / 1e15)} P${unit}`;
  const [prefix, factor] = PREFIXES.find(([, each]) => Math.abs(value) >= 0.9995 * each) ?? ["", 1];
  return `${digits(value / factor)} ${prefix}${unit}`.trim();
}

export const show = {
  bytes: (value) => metric(value, "B"),
  rate: (value) => `${metric(value, "B")}/s`,
  flops: (value) => metric(value, "FLOP/s"),
  seconds(value) {
    if (value >= 86400 * 2) return `${digits(value / 86400)} days`;
    if (value >= 7200) return `${digits(value / 3600)} h`;
    if (value >= 1 || value === 0) return `${digits(value)} s`;
    if (value >= 1e-3) return `${digits(value * 1e3)} ms`;
    if (value >= 1e-6) return `${digits(value * 1e6)} µs`;
    return `${digits(value * 1e9)} ns`;
  },
  percent: (value) => `${digits(100 * value)} %`,
  count: (value) => FORMATS[3].format(value),
  short(value) { // 70.6B parameters, 1.4T tokens
    const [suffix, factor] = [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3], ["", 1]].find(([, each]) => value >= each)
      ?? ["", 1];
    return `${digits(value / factor)}${suffix}`;
  },
  dollars(value) {
    const [suffix, factor] = [["B", 1e9], ["M", 1e6], ["k", 1e3], ["", 1]].find(([, each]) => value >= each) ?? ["", 1];
    return `$${digits(value / factor)}${suffix}`;
  },
};

// ---- controls -------------------------------------------------------------------------------------------------------
// Each returns {element, set(value, options), enable(on)}; `onInput` gets the new value.

let numbered = 0;

export function slider({ label, unit = "", values, value, onInput, format = String, help }) {
  const id = `control-${numbered++}`;
  let known = values;
  const input = h("input", {
    type: "range", id, min: 0, step: 1, oninput: () => { write(); onInput(known[input.valueAsNumber]); },
  });
  const output = h("output", { for: id }), counted = h("small", {});
  const element = h("div", { class: "control", title: help },
    h("label", { for: id }, label), h("span", { class: "value" }, output, unit && counted), input);
  function write() {
    const text = format(known[input.valueAsNumber]);
    output.textContent = text;
    counted.textContent = ` ${text === "1" ? unit.replace(/s$/, "") : unit}`;
    input.setAttribute("aria-valuetext", `${text}${counted.textContent}`.trim());
  }
  function set(to, from = known) {
    known = from.includes(to) ? from : [...from, to].sort((a, b) => a - b);
    input.max = known.length - 1;
    input.value = known.indexOf(to);
    write();
  }
  set(value);
  return { element, input, set, values: () => known, enable: (on) => { input.disabled = !on; } };
}

export function choice({ label, options, value, onInput, help }) {
  const id = `control-${numbered++}`;
  const select = h("select", { id, onchange: () => onInput(select.value) });
  let known = [];
  function set(to, from) {
    if (!from && known.some((option) => option.name === to)) {
      select.value = to;
      return;
    }
    known = (from ?? known).map((option) => (typeof option === "string" ? { name: option } : option));
    if (!known.some((option) => option.name === to)) known = [{ name: to }, ...known];
    select.replaceChildren(...known.map((o) => h("option", { value: o.name, disabled: o.disabled }, o.text ?? o.name)));
    select.value = to;
  }
  set(value, options);
  const element = h("div", { class: "control wide", title: help }, h("label", { for: id }, label), select);
  return {
    element, input: select, set, values: () => known.map((option) => option.name),
    enable: (on) => { select.disabled = !on; },
  };
}

export function check({ label, value, onInput, help }) {
  const input = h("input", { type: "checkbox", onchange: () => onInput(input.checked) });
  input.checked = value;
  return {
    element: h("label", { class: "control check", title: help }, input, h("span", {}, label)), input,
    set: (to) => { input.checked = to; }, values: () => [false, true], enable: (on) => { input.disabled = !on; },
  };
}

export function text({ label, value, onInput, placeholder, lines, suggestions, help }) {
  const id = `control-${numbered++}`;
  const listed = suggestions && h("datalist", { id: `${id}-list` }, suggestions.map((each) => h("option", { value: each })));
  const input = h(lines ? "textarea" : "input", {
    id, rows: lines, placeholder, spellcheck: "false", autocomplete: "off", list: listed ? listed.id : undefined,
    oninput: () => onInput(input.value),
  });
  input.value = value;
  return {
    element: h("div", { class: "control wide", title: help }, h("label", { for: id }, label), input, listed), input,
    set: (to) => { if (document.activeElement !== input) input.value = to; }, values: () => [],
    enable: (on) => { input.disabled = !on; },
  };
}

export function button(label, onclick, attributes = {}) {
  return h("button", { type: "button", onclick, ...attributes }, label);
}

export function copyable(content, label) {
  const copy = button("Copy", async () => {
    try { await navigator.clipboard.writeText(content); } catch { select(code); }
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1200);
  }, { class: "small", "aria-label": `Copy ${label}` });
  const code = h("pre", { tabindex: "0", "aria-label": label }, content);
  return h("div", { class: "copyable" }, code, copy);
}

function select(element) {
  const range = document.createRange();
  range.selectNodeContents(element);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
}

// Replaces an element's children; the focus stays on the control with the same name.
export function redraw(element, ...children) {
  const name = (each) => each.getAttribute("aria-label") ?? each.textContent;
  const focused = element.contains(document.activeElement) ? name(document.activeElement) : null;
  element.replaceChildren(...children);
  if (focused) [...element.querySelectorAll("button, pre")].find((each) => name(each) === focused)?.focus({ preventScroll: true });
}

export function powers(most, from = 1) {
  const found = [];
  for (let n = from; n <= most; n *= 2) found.push(n);
  return found;
}

export function divisors(n) {
  const found = [];
  for (let d = 1; d * d <= n; d++) if (n % d === 0) found.push(d, ...(d * d < n ? [n / d] : []));
  return found.sort((a, b) => a - b);
}

// ---- answers --------------------------------------------------------------------------------------------------------

// Calls the newest request only: while one is under way, later ones replace each other. `onAnswer(answer, request)`.
export function latest(api, name, onAnswer, onRefusal) {
  let running = false, next;
  return async function ask(request) {
    next = request;
    if (running) return;
    running = true;
    while (next !== undefined) {
      const asked = next;
      next = undefined;
      try {
        const answer = await api(name, asked);
        if (next === undefined) onAnswer(answer, asked);
      } catch (error) {
        if (next === undefined) onRefusal(error, asked);
      }
    }
    running = false;
  };
}

// A message of the product, its first line in bold: what is wrong; the others: what is allowed.
export function refusal(error) {
  const [first, ...rest] = error.message.split("\n");
  return h("div", { class: "refusal", role: "alert" }, h("b", {}, first), rest.map((line) => h("div", {}, line.trim())));
}

// A number in large print with its name above and a note below; a text "113k tokens/s" has its unit in small print.
export function tile(name, value, note, attributes = {}) {
  const [, number, unit] = /^(\S*\d\S*) (.+)$/.exec(value) ?? [null, value, ""];
  return h("div", { class: "tile", ...attributes }, h("span", {}, name),
    h("b", {}, number, unit && h("small", {}, ` ${unit}`)), note && h("small", {}, note));
}

export function legend(items) {
  return h("ul", { class: "legend" }, items.map(({ name, colour, value, dash }) => {
    const background = dash ? `repeating-linear-gradient(90deg, ${colour} 0 3px, transparent 3px 5px)` : colour;
    return h("li", {}, h("i", { style: { background } }), name, value && h("b", {}, ` ${value}`));
  }));
}

// A stacked bar with an optional limit; `items`: [{name, value, colour, text}].
export function stackedBar(items, { total, limit, limitText, label }) {
  const most = Math.max(total, limit ?? 0) * (limit ? 1.04 : 1) || 1;
  const over = limit !== undefined && total > limit;
  return h("div", { class: `bar${over ? " over" : ""}`, role: "img", "aria-label": label },
    items.filter((item) => item.value > 0).map((item) => h("i", {
      style: { width: `${100 * item.value / most}%`, background: item.colour }, title: `${item.name}: ${item.text}`,
    })),
    limit !== undefined && h("u", { style: { left: `${100 * limit / most}%` }, title: limitText }));
}

// ---- charts ---------------------------------------------------------------------------------------------------------

export function logScale([low, high], [from, to]) {
  const a = Math.log10(low), b = Math.log10(high);
  const scale = (value) => from + (to - from) * (Math.log10(value) - a) / (b - a);
  scale.ticks = () => {
    const found = [];
    for (let e = Math.ceil(a - 1e-9); e <= Math.floor(b + 1e-9); e++) found.push(10 ** e);
    return found;
  };
  return scale;
}

export function linearScale([low, high], [from, to]) {
  const scale = (value) => from + (to - from) * (value - low) / (high - low || 1);
  scale.ticks = (count = 5) => {
    const step = niceStep((high - low) / count);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-9); i++) found.push(i * step);
    return found;
  };
  return scale;
}

function niceStep(rough) {
  const base = 10 ** Math.floor(Math.log10(rough || 1));
  return base * ([1, 2, 5, 10].find((factor) => factor * base >= rough * 0.999) ?? 10);
}

// Axes of an SVG chart: {x: {scale, format, label}, y: the same, width, height, margin: {left, right, top, bottom}}.
export function axes({ x, y, width, height, margin }) {
  const bottom = height - margin.bottom, right = width - margin.right;
  return s("g", { class: "axes" },
    x.scale.ticks().map((value) => s("g", {},
      s("line", { x1: x.scale(value), x2: x.scale(value), y1: margin.top, y2: bottom }),
      s("text", { x: x.scale(value), y: bottom + 16, "text-anchor": "middle" }, x.format(value)))),
    y.scale.ticks().map((value) => s("g", {},
      s("line", { x1: margin.left, x2: right, y1: y.scale(value), y2: y.scale(value) }),
      s("text", { x: margin.left - 7, y: y.scale(value) + 4, "text-anchor": "end" }, y.format(value)))),
    s("text", { class: "name", x: right, y: height - 4, "text-anchor": "end" }, x.label),
    s("text", { class: "name", x: 0, y: 11 }, y.label));
}

// The colour of a CSS variable, as a canvas takes it; asked for once for each theme, as an answer costs a layout.
const known = new Map();
addEventListener("themechange", () => known.clear());
export function colour(name) {
  if (!known.has(name)) known.set(name, findColour(name));
  return known.get(name);
}

function findColour(name) {
  const probe = h("i", { style: { color: `var(${name})`, display: "none" } });
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

// A canvas of the width of its container, sharp on any screen: draws again when its size or the theme changes.
export function canvas(draw, { height, label }) {
  const element = h("canvas", { role: "img", "aria-label": label });
  const frame = h("div", { class: "frame" }, element);
  function paint() {
    const wide = frame.clientWidth;
    if (!wide) return;
    const tall = typeof height === "function" ? height(wide) : height, ratio = devicePixelRatio || 1;
    element.width = Math.round(wide * ratio);
    element.height = Math.round(tall * ratio);
    element.style.height = `${tall}px`;
    const context = element.getContext("2d");
    context.scale(ratio, ratio);
    draw(context, wide, tall);
  }
  new ResizeObserver(paint).observe(frame);
  addEventListener("themechange", paint);
  return { element: frame, canvas: element, paint };
}

// The order of colours of categories, from CSS variables.
export const COLOURS = ["--blue", "--orange", "--teal", "--violet", "--yellow", "--plum", "--red", "--grey"];

// Roofline panel: which operations of a model arithmetic bounds on an accelerator, and which memory.
import {
  COLOURS, axes, button, choice, h, latest, logScale, metric, powers, refusal, s, show, slider, tile,
} from "lab/kit";
import { table } from "lab/drawing";

export const title = "Roofline";

export const defaults = {
  model: "llama-3-8b", accelerator: "h100-sxm", precision: "bf16", batch: 1, sequence_length: 1024, others: [],
};

export function buildRequest({ model, accelerator, precision, batch, sequence_length }) {
  return { model, accelerator, precision, batch, sequence_length };
}

export async function mount(element, state, api, onState) {
  const choices = await api("roofline-choices");
  let last, measured = null;
  const one = (name) => (value) => change({ [name]: value });
  const by = {
    accelerator: choice({
      label: "Accelerator", options: choices.accelerators.map(({ name }) => name), value: state.accelerator,
      onInput: one("accelerator"),
    }),
    precision: choice({ label: "Precision", options: choices.precisions, value: state.precision, onInput: one("precision") }),
    model: choice({
      label: "Model", options: choices.models.map(({ name, parameters }) => ({ name, text: `${name} · ${show.short(parameters)}` })),
      value: state.model, onInput: one("model"),
    }),
    batch: slider({ label: "Batch", unit: "sequences", values: powers(256), value: state.batch, onInput: one("batch") }),
    sequence_length: slider({
      label: "Sequence length", unit: "tokens", values: powers(2 ** 17), value: state.sequence_length, format: show.count,
      onInput: one("sequence_length"),
    }),
  };
  const compare = choice({
    label: "Compare with", value: "", onInput: (name) => {
      if (name && !state.others.includes(name)) change({ others: [...state.others, name] });
      compare.set("");
    },
    options: [{ name: "", text: "another accelerator" }, ...choices.accelerators.map(({ name }) => ({ name }))],
  });
  const compared = h("div", { class: "row" });
  const measure = button("Measure on this machine", measureHere, { class: "main", id: "measure" });
  const note = h("p", { class: "note" }, "Times products and a copy on one core, in about three seconds.");
  element.append(
    h("form", { class: "controls", "aria-label": "Roofline", onsubmit: (event) => event.preventDefault() },
      h("fieldset", {}, h("legend", {}, "Accelerator"), by.accelerator.element, by.precision.element, compare.element, compared),
      h("fieldset", {}, h("legend", {}, "Model and batch"), by.model.element, by.batch.element, by.sequence_length.element),
      h("fieldset", {}, h("legend", {}, "This machine"), measure, note)));
  const refused = h("div"), tiles = h("div", { class: "tiles" }), drawing = h("div", { class: "chart" }), operations = h("div");
  const here = h("div");
  element.append(h("div", { class: "answers" }, refused, tiles,
    h("section", {}, h("h2", {}, "Roofline ", h("small", {}, "of one layer's forward; both axes are logarithmic")), drawing),
    h("section", {}, h("h2", {}, "Operations of one layer, on one device"), operations), here));

  const ask = latest(api, "roofline", answered, (error) => refused.replaceChildren(refusal(error)));
  const watcher = new ResizeObserver(() => { if (last) draw(); });
  watcher.observe(drawing);

  function change(changed) {
    Object.assign(state, changed);
    onState(state);
    ask(buildRequest(state));
  }

  function answered(answer) {
    last = answer;
    refused.replaceChildren();
    for (const [name, control] of Object.entries(by)) control.set(state[name]);
    writeTiles();
    writeTable();
    compared.replaceChildren(...state.others.map((name) => button(`${name} ×`, () =>
      change({ others: state.others.filter((each) => each !== name) }), { class: "small", "aria-label": `Remove ${name}` })));
    draw();
    if (api.saved) {
      measure.disabled = true;
      for (const [name, control] of Object.entries(by)) {
        const others = control.values().filter((value) => value !== state[name]);
        control.enable(others.some((value) => api.has("roofline", buildRequest({ ...state, [name]: value }))));
      }
    }
  }

  function writeTiles() {
    const { least, tokens, peak, bandwidth, ridge, format } = last;
    const enough = least.tokens !== null && tokens >= least.tokens;
    tiles.replaceChildren(
      tile("Dense peak", show.flops(peak), `${format}, by the data sheet`), tile("Memory bandwidth", show.rate(bandwidth), "by the data sheet"),
      tile("Ridge", `${show.count(Math.round(ridge))} FLOPs/B`, "below it, memory bounds"),
      tile("Tokens of this batch", show.count(tokens), `${show.count(state.batch)} × ${show.count(state.sequence_length)}`),
      tile("Least compute-bound batch", least.tokens === null ? "none" : `${show.count(Math.ceil(least.tokens))} tokens`,
        least.tokens === null ? `[b, ${least.k}] × [${least.k}, ${least.n}] is too narrow`
          : `in [b, ${least.k}] × [${least.k}, ${least.n}]: this batch is ${enough ? "enough" : "too small"}`, { id: "least" }));
  }

  function writeTable() {
    operations.replaceChildren(table(
      ["operation", "FLOPs", "bytes of memory", "FLOPs/B", "bound by", "at most", "time at least"],
      last.operations.map((each, i) => [
        [h("i", { class: "dot", style: { background: `var(${COLOURS[i % COLOURS.length]})` } }), each.name],
        metric(each.flops, "FLOP"), show.bytes(each.bytes), number(each.intensity),
        each.intensity >= last.ridge ? "arithmetic" : "memory", show.flops(each.rate), show.seconds(each.seconds),
      ])));
  }

  function draw() {
    const width = Math.max(300, drawing.clientWidth), height = Math.min(430, Math.max(280, width * 0.5));
    drawing.replaceChildren(chart({ ...last, others: otherRoofs(), width, height }));
    here.replaceChildren(measured ? h("section", {},
      h("h2", {}, "This machine ", h("small", {}, `one core, fp32: fastest product ${show.flops(measured.peak)}, copies ${show.rate(measured.bandwidth)}`)),
      chart({ ...measured, operations: measured.points, others: [], accelerator: "this core", width, height, measured: true })) : "");
  }

  function otherRoofs() {
    return choices.accelerators.filter(({ name }) => state.others.includes(name))
      .map(({ name, peaks, bandwidth }) => ({ name, peak: peaks[last.format], bandwidth })).filter(({ peak }) => peak);
  }

  async function measureHere() {
    measure.disabled = true;
    note.textContent = "Measuring ...";
    try {
      measured = await api("roofline-measure");
      note.textContent = "Measured. Operands in a cache are read faster than main memory, which the roof is made of.";
      draw();
    } catch (error) {
      note.replaceChildren(refusal(error));
    }
    measure.disabled = false;
  }

  await ask(buildRequest(state));
  return { unmount: () => watcher.disconnect() };
}

function number(value) {
  return value.toLocaleString("en-US", { maximumSignificantDigits: 3 });
}

// The roof, dashed roofs to compare with, and a point for each operation.
function chart({ peak, bandwidth, ridge, operations, others, accelerator, width, height, measured }) {
  const margin = { left: 62, right: 16, top: 24, bottom: 40 };
  const intensities = operations.map((each) => each.intensity);
  const rates = [peak, ...others.map((each) => each.peak), ...operations.map((each) => each.rate)];
  const low = 10 ** Math.floor(Math.log10(Math.min(...intensities, ridge / 30)));
  const high = 10 ** Math.ceil(Math.log10(Math.max(...intensities, ridge * 10)));
  const floor = 10 ** Math.floor(Math.log10(Math.min(low * bandwidth * 2, ...rates)));
  const x = logScale([low, high], [margin.left, width - margin.right]);
  const y = logScale([floor, Math.max(...rates) * 2.2], [height - margin.bottom, margin.top]);
  const roof = (top, slope) => {
    const left = Math.max(low, floor / slope), corner = Math.min(high, Math.max(left, top / slope));
    return `M${x(left)},${y(left * slope)}L${x(corner)},${y(corner * slope)}L${x(high)},${y(top)}`;
  };
  const heading = `${accelerator}: at most ${show.flops(peak)}, ridge at ${number(ridge)} FLOPs per byte`;
  return s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": heading, class: "roofline" },
    axes({
      x: { scale: x, format: number, label: "arithmetic intensity, FLOPs per byte of memory" },
      y: { scale: y, format: (value) => metric(value, ""), label: "FLOP/s" }, width, height, margin,
    }),
    s("path", { d: `${roof(peak, bandwidth)}V${height - margin.bottom}H${x(low)}Z`, class: "area" }),
    others.map((each) => s("path", { d: roof(each.peak, each.bandwidth), class: "other" })),
    s("path", { d: roof(peak, bandwidth), class: "roof" }),
    s("line", { x1: x(ridge), x2: x(ridge), y1: y(peak), y2: height - margin.bottom, class: "ridge" }),
    operations.map((each, i) => s("g", { class: "point" },
      s("circle", { cx: x(each.intensity), cy: y(each.rate), r: 5.5, fill: `var(${COLOURS[i % COLOURS.length]})` },
        s("title", {}, `${each.name}: ${number(each.intensity)} FLOPs/B, ${measured ? "measured" : "at most"} ${show.flops(each.rate)}`)))),
    spread([
      { name: `${accelerator} ${show.flops(peak)}`, left: width - margin.right, top: y(peak) - 6, step: -13, end: true, strong: true },
      { name: `ridge ${number(ridge)}`, left: x(ridge) + 5, top: height - margin.bottom - 6, step: -13 },
      ...others.map((each) => ({ name: each.name, left: width - margin.right, top: y(each.peak) - 5, step: -13, end: true })),
      ...(width < 560 ? [] : operations).map((each) => {
        const at = x(each.intensity), end = at + wide(each.name) > width - 10;
        return { name: each.name, left: end ? at - 8 : at + 8, top: y(each.rate) + 18, step: 13, end };
      }),
    ], operations.map((each) => [x(each.intensity) - 7, x(each.intensity) + 7, y(each.rate) + 4])));
}

const wide = (name) => name.length * 6.4 + 10;

// Labels, each a line further up or down (`step`) while it would lie over another or over what is `taken`: [from, to, y].
function spread(labels, taken) {
  return labels.map(({ name, left, top, step, end, strong }) => {
    const from = end ? left - wide(name) : left, to = from + wide(name);
    while (taken.some(([a, b, y]) => a < to && from < b && Math.abs(y - top) < 12)) top += step;
    taken.push([from, to, top]);
    return s("text", { x: left, y: top, "text-anchor": end ? "end" : "start", class: strong ? "label strong" : "label" }, name);
  });
}

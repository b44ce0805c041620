// Layout panel: a layout's time, memory, cost and traffic on a cluster, after each move of a slider.
import {
  COLOURS, button, check, choice, copyable, divisors, h, latest, legend, powers, redraw, refusal, show, slider, stackedBar, text, tile,
} from "lab/kit";
import { table } from "lab/drawing";
import { meshChart } from "lab/mesh_chart";

export const title = "Layout";

export const defaults = {
  model: "llama-3-70b", config: "", layers: null, hidden: null, heads: null, ffn: null, cluster: "16x8xH100",
  precision: "bf16", optimizer: "adamw", global_batch: "4M", sequence_length: 8192, tokens: null, price: null,
  dp: null, zero: 1, tp: 8, sequence_parallel: true, cp: 1, ep: 1, pp: 4, virtual_stages: null, schedule: "1f1b",
  micro_batch: 1, recompute: "none", pins: [],
};

const PARALLEL = ["dp", "zero", "tp", "sequence_parallel", "cp", "ep", "pp", "virtual_stages", "schedule", "micro_batch",
  "recompute"];
const SIZES = ["layers", "hidden", "heads", "ffn"];
const CLUSTERS = ["8xH100", "16x8xH100", "64x8xH100", "512x8xH100", "2048x8xH100", "64x8xA100", "64x8xB200", "64x8xMI300X",
  "v5p-4096", "v5e-256"];
const MEMORY = {
  parameters: "--blue", gradients: "--orange", optimizer: "--violet", activations: "--teal", gathered: "--yellow",
  buffers: "--plum", stashed: "--red", reserve: "--grey",
};
const MEMORY_NAMES = {
  gathered: "gathered parameters", buffers: "buffers", stashed: "stashed weights", reserve: "allocator and libraries",
};

// The request of a state: what does not differ from field to field is left to the server's checks.
export function buildRequest(state) {
  const { pins, ...request } = state;
  const parallel = {};
  for (const name of PARALLEL) {
    if (name !== "dp" || state.dp !== null) parallel[name] = state[name];
    delete request[name];
  }
  return { ...request, parallel };
}

export async function mount(element, state, api, onState) {
  const choices = await api("layout-choices");
  let last; // the newest answer
  const controls = buildControls(state, choices, change);
  const headline = h("div", { class: "answers headline", "aria-live": "polite" });
  const details = h("div", { class: "answers details" });
  element.append(headline, controls.element, details);

  const tiles = h("div", { class: "tiles" }), refused = h("div");
  headline.append(refused, tiles);
  const time = section("One step of the busiest rank"), memory = section("Memory of the fullest rank");
  const chart = meshChart();
  const mesh = h("section", {}, h("h2", {}, "Mesh ", h("small", {}, "accelerators by pipeline rank; point at one, or move with the arrow keys, to see its groups")),
    chart.element);
  const moves = h("div", { class: "moves" });
  const movesButton = button("What would you change?", () => askMoves(), { class: "main" });
  const movesSection = section("Changes that help most", h("div", { class: "row" }, movesButton), moves);
  const pinned = section("Pinned layouts");
  const files = section("The same, without the page");
  details.append(h("div", { class: "two plain" }, time.element, memory.element), mesh, movesSection.element, pinned.element,
    files.element);

  const ask = latest(api, "layout", answered, refusedWith);
  const askForMoves = latest(api, "layout-moves", movesAnswered, (error) => moves.replaceChildren(refusal(error)));
  let waiting;

  function change(changed) {
    Object.assign(state, changed);
    onState(state);
    clearTimeout(waiting);
    ask(buildRequest(state)); // first: the server computes while the page writes its controls
    controls.write(state, last);
    moves.replaceChildren();
    movesButton.disabled = false;
  }

  function answered(answer) {
    last = answer;
    refused.replaceChildren();
    details.classList.remove("stale");
    controls.write(state, answer);
    tiles.replaceChildren(...headlineTiles(answer));
    writeTime(time.body, answer);
    writeMemory(memory.body, answer);
    chart.set(answer);
    writeFiles(files.body, answer);
    writePins();
    if (!answer.memory.fits && api.has("layout-moves", buildRequest(state))) waiting = setTimeout(() => askMoves(), 350); // once the slider rests
    if (api.saved) limitControls();
  }

  function refusedWith(error) {
    refused.replaceChildren(refusal(error));
    details.classList.add("stale");
  }

  function askMoves(more = {}) {
    movesButton.disabled = true;
    moves.replaceChildren(h("p", { class: "note" }, more.thorough ? "Searching all layouts of this cluster ..."
      : "Pricing the neighbours of this layout ..."));
    askForMoves({ ...buildRequest(state), ...more });
  }

  function movesAnswered(answer) {
    movesButton.disabled = false;
    moves.replaceChildren(...describeMoves(answer, last, (parallel) => {
      const to = Object.fromEntries(PARALLEL.map((name) => [name, parallel[name] ?? defaultOf(name)]));
      change({ ...to, dp: null });
    }, () => askMoves({ thorough: true })));
  }

  function writePins() {
    const current = { name: "this one", state: { ...state, pins: [] }, row: summary(last) };
    const pin = button("Pin this layout", () => {
      state.pins = [...state.pins, { state: differing(state), row: summary(last) }];
      onState(state);
      writePins();
    }, { id: "pin" });
    redraw(pinned.body,
      pinTable([current, ...state.pins.map((each, i) => ({ name: `pin ${i + 1}`, ...each }))], (i) => {
        state.pins = state.pins.filter((_, j) => j !== i);
        onState(state);
        writePins();
      }, (chosen) => change({ ...structuredClone(defaults), ...chosen, pins: state.pins })),
      h("div", { class: "row" }, pin, h("small", {}, "Pins are in the page's URL.")));
  }

  function limitControls() { // in a saved page, to what was recorded
    for (const [name, control] of Object.entries(controls.by)) {
      const others = control.values().filter((value) => value !== state[name]);
      control.enable(others.some((value) => api.has("layout", buildRequest({ ...state, [name]: value }))));
    }
    movesButton.disabled = !api.has("layout-moves", buildRequest(state));
  }

  controls.write(state);
  await ask(buildRequest(state));
  return { unmount: () => clearTimeout(waiting) };
}

function section(name, ...children) {
  const body = h("div", {});
  return { element: h("section", {}, h("h2", {}, name), ...children, body), body };
}

function defaultOf(name) {
  return { virtual_stages: null, sequence_parallel: false, recompute: "none", schedule: "1f1b", zero: 0 }[name] ?? 1;
}

function differing(state) {
  return Object.fromEntries(Object.entries(state).filter(([name, value]) =>
    name !== "pins" && JSON.stringify(value) !== JSON.stringify(defaults[name])));
}

// ---- controls -------------------------------------------------------------------------------------------------------

function buildControls(state, choices, change) {
  const one = (name) => (value) => change({ [name]: value });
  const models = choices.models.map(({ name, parameters }) => ({ name, text: `${name} · ${show.short(parameters)}` }));
  const by = {
    model: choice({
      label: "Model", options: models, value: state.model,
      onInput: (value) => change({ model: value, config: "", layers: null, hidden: null, heads: null, ffn: null, ep: 1 }),
    }),
    layers: slider({ label: "Layers", values: [1], value: 1, onInput: one("layers") }),
    hidden: slider({ label: "Hidden size", values: [1], value: 1, onInput: one("hidden"), format: show.count }),
    heads: slider({ label: "Attention heads", values: [1], value: 1, onInput: one("heads") }),
    ffn: slider({ label: "Feed-forward size", values: [1], value: 1, onInput: one("ffn"), format: show.count }),
    config: text({
      label: "config.json", value: state.config, lines: 5, placeholder: "Paste a Hugging Face config.json",
      onInput: (value) => change({ config: value.trim(), layers: null, hidden: null, heads: null, ffn: null, ep: 1 }),
    }),
    cluster: text({
      label: "Cluster", value: state.cluster, suggestions: CLUSTERS, onInput: (value) => value && change({ cluster: value }),
      help: "8xH100, 64x8xH100-IB400, v5p-4096, or an accelerator of the catalog",
    }),
    nodes: slider({
      label: "Nodes", values: powers(2048), value: 1,
      onInput: (value) => change({ cluster: state.cluster.replace(/^(\d+x)?(\d+x)/, (_, many, each) => `${value}x${each}`) }),
    }),
    precision: choice({ label: "Precision", options: choices.precisions, value: state.precision, onInput: one("precision") }),
    optimizer: choice({ label: "Optimizer", options: choices.optimizers, value: state.optimizer, onInput: one("optimizer") }),
    global_batch: slider({
      label: "Global batch", unit: "tokens", values: powers(2 ** 27, 2 ** 15), value: 2 ** 22, format: batchText,
      onInput: (value) => change({ global_batch: batchText(value) }),
    }),
    sequence_length: slider({
      label: "Sequence length", unit: "tokens", values: powers(2 ** 20, 512), value: 8192, format: show.count,
      onInput: one("sequence_length"),
    }),
    tokens: text({
      label: "Token budget", value: state.tokens ?? "", placeholder: "20 per parameter",
      onInput: (value) => change({ tokens: number(value) }), help: "Tokens of the complete training, such as 15e12",
    }),
    dp: slider({
      label: "dp · data parallel", values: [0], value: 0, format: (n) => (n ? String(n) : "fills the cluster"),
      onInput: (value) => change({ dp: value || null }),
    }),
    zero: slider({
      label: "ZeRO stage", values: [0, 1, 2, 3], value: 1, onInput: one("zero"),
      format: (n) => ["0 · nothing sharded", "1 · optimizer", "2 · + gradients", "3 · + parameters"][n],
    }),
    tp: slider({ label: "tp · tensor parallel", values: powers(64), value: 8, onInput: one("tp") }),
    sequence_parallel: check({ label: "sp · sequence parallel, with tp", value: true, onInput: one("sequence_parallel") }),
    cp: slider({ label: "cp · context parallel", values: powers(64), value: 1, onInput: one("cp") }),
    ep: slider({ label: "ep · expert parallel", values: [1], value: 1, onInput: one("ep") }),
    pp: slider({ label: "pp · pipeline parallel", values: [1], value: 1, onInput: one("pp") }),
    schedule: choice({
      label: "Schedule", options: choices.schedules.map(({ name }) => name), value: state.schedule,
      onInput: (value) => change({ schedule: value, virtual_stages: null }),
    }),
    virtual_stages: slider({
      label: "Stages per rank", values: [2, 3, 4, 5, 6, 8, 10], value: 2, onInput: one("virtual_stages"),
    }),
    micro_batch: slider({ label: "Micro-batch", unit: "sequences", values: powers(64), value: 1, onInput: one("micro_batch") }),
    recompute: choice({ label: "Recompute", options: choices.recompute, value: state.recompute, onInput: one("recompute") }),
  };
  const group = (name, ...names) => h("fieldset", {}, h("legend", {}, name), names.map((each) => by[each].element));
  const sizes = h("details", { class: "sizes" }, h("summary", {}, "Change its sizes, or paste another"),
    [...SIZES, "config"].map((name) => by[name].element));
  if (state.config || SIZES.some((name) => state[name])) sizes.open = true;
  const element = h("form", { class: "controls", "aria-label": "Layout", onsubmit: (event) => event.preventDefault() },
    h("fieldset", {}, h("legend", {}, "Model"), by.model.element, sizes),
    group("Cluster and batch", "cluster", "nodes", "precision", "optimizer", "global_batch", "sequence_length", "tokens"),
    group("Layout", "dp", "zero", "tp", "sequence_parallel", "cp", "ep", "pp", "schedule", "virtual_stages", "micro_batch",
      "recompute"));

  function write(now, answer) {
    const known = choices.models.find(({ name }) => name === now.model) ?? choices.models[0];
    const model = now.config && answer ? answer.model : known;
    const devices = answer?.cluster.devices ?? 2 ** 11;
    for (const name of SIZES) by[name].set(now[name] ?? model[name], sizeValues(name, known, now.hidden ?? model.hidden));
    for (const name of ["tp", "cp", "zero", "micro_batch", "sequence_length"]) by[name].set(now[name]);
    for (const name of ["model", "schedule", "recompute", "precision", "optimizer", "cluster"]) by[name].set(now[name]);
    by.sequence_parallel.set(now.sequence_parallel);
    by.sequence_parallel.enable(now.tp > 1);
    by.dp.set(now.dp ?? 0, [0, ...divisors(devices)]);
    by.pp.set(now.pp, [...new Set([...divisors(devices), ...powers(16)])].filter((n) => n <= (now.layers ?? model.layers))
      .sort((a, b) => a - b));
    by.ep.element.hidden = !model.experts;
    by.ep.set(now.ep, divisors(model.experts?.count ?? 1));
    const open = choices.schedules.find(({ name }) => name === now.schedule)?.virtual === null;
    by.virtual_stages.element.hidden = !open;
    if (open) by.virtual_stages.set(now.virtual_stages ?? 2);
    by.schedule.element.hidden = now.pp === 1;
    const nodes = now.cluster.match(/^(?:(\d+)x)?\d+x\D/);
    by.nodes.element.hidden = !nodes;
    if (nodes) by.nodes.set(Number(nodes[1] ?? 1));
    by.global_batch.set(batchTokens(now.global_batch, now.sequence_length));
  }
  return { element, by, write };
}

function sizeValues(name, model, hidden) {
  if (name === "heads") return divisors(hidden).filter((heads) => hidden / heads >= 32 && heads > 1);
  const unit = { layers: 1, hidden: 128, ffn: 256 }[name];
  const parts = [1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1, 5 / 4, 3 / 2, 7 / 4, 2, 5 / 2, 3, 4];
  const found = parts.map((part) => Math.max(unit, Math.round((model[name] * part) / unit) * unit));
  return [...new Set([...found, model[name]])].sort((a, b) => a - b);
}

function batchText(tokens) {
  return tokens >= 2 ** 20 ? `${tokens / 2 ** 20}M` : `${tokens / 2 ** 10}K`;
}

function batchTokens(given, sequence) {
  const factor = { K: 2 ** 10, M: 2 ** 20 }[given.at(-1)?.toUpperCase()];
  return (factor ? Number(given.slice(0, -1)) * factor : Number(given) * sequence) || 2 ** 22;
}

function number(given) {
  const found = Number(given);
  return given.trim() && Number.isFinite(found) && found > 0 ? found : null;
}

// ---- answers --------------------------------------------------------------------------------------------------------

function interval([low, high], format) {
  return `80 % interval ${format(low)} to ${format(high)}`;
}

function headlineTiles({ step, mfu, memory, tokens_per_second, cluster, training, layout, batch }) {
  const verdict = memory.fits ? "fits" : memory.may_fit ? "may not fit" : "does not fit";
  const days = training.days >= 1 ? `${show.count(Math.round(training.days * 10) / 10)} days` : show.seconds(training.days * 86400);
  return [
    tile("Step time", show.seconds(step.seconds), interval(step.interval, show.seconds), { title: step.accuracy, id: "step" }),
    tile("MFU", show.percent(mfu.value), interval(mfu.interval, show.percent), { id: "mfu" }),
    tile("Memory of the fullest rank", show.bytes(memory.reserved), `of ${show.bytes(memory.capacity)}: ${verdict}`,
      { class: `tile${memory.fits ? "" : " bad"}`, id: "memory" }),
    tile("Throughput", `${show.short(tokens_per_second)} tokens/s`, `${show.count(Math.round(tokens_per_second / cluster.devices))} tokens/s a device`),
    tile(`Training on ${show.short(training.tokens)} tokens`, days, interval(training.days_interval.map((n) => n * 86400), show.seconds)),
    tile("Cost", training.dollars ? show.dollars(training.dollars) : "no price",
      training.price ? `at $${training.price} a device-hour` : "in the catalog for this accelerator"),
    tile("Ranks", show.count(cluster.devices), layout.equation),
    tile("Step", `${show.short(batch.tokens)} tokens`, `${show.count(batch.microbatches)} micro-batches a replica`),
  ];
}

function writeTime(body, { breakdown, step, bound }) {
  const parts = breakdown.filter(([, seconds]) => seconds > 1e-4 * step.seconds);
  const items = parts.map(([name, seconds], i) => ({
    name, value: seconds, text: `${show.seconds(seconds)}, ${show.percent(seconds / step.seconds)}`,
    colour: name === "bubble" ? "var(--lane)" : `var(${COLOURS[i % COLOURS.length]})`,
  }));
  body.replaceChildren(
    stackedBar(items, { total: step.seconds, label: `Time of a step: ${items.map((each) => `${each.name} ${each.text}`).join(", ")}` }),
    legend(items.map((item) => ({ ...item, colour: item.name === "bubble" ? "var(--line)" : item.colour, value: item.text }))),
    h("p", { class: "note" }, `${bound}.`));
}

function writeMemory(body, { memory }) {
  const items = memory.parts.filter(([, size]) => size > 0).map(([name, size]) => ({
    name: MEMORY_NAMES[name] ?? name, value: size, text: show.bytes(size), colour: `var(${MEMORY[name]})`,
  }));
  const most = Math.max(...memory.ranks);
  body.replaceChildren(
    stackedBar(items, {
      total: memory.reserved, limit: memory.capacity, limitText: `limit: ${show.bytes(memory.capacity)}`,
      label: `Memory: ${items.map((each) => `${each.name} ${each.text}`).join(", ")}; limit ${show.bytes(memory.capacity)}`,
    }),
    legend(items.map((item) => ({ ...item, value: item.text }))),
    h("p", { class: "note" }, `${interval(memory.interval, show.bytes)}. The line is the limit, ${show.bytes(memory.capacity)} of a device.`),
    memory.ranks.length > 1 ? h("div", { class: "ranks" }, h("small", {}, "Each pipeline rank, first to last"),
      h("div", { class: "columns" }, memory.ranks.map((size, rank) => h("i", {
        style: { height: `${Math.max(3, 40 * size / Math.max(most, memory.capacity))}px` },
        class: size > memory.capacity ? "bad" : "", title: `pp ${rank}: ${show.bytes(size)}`,
      })))) : "");
}

function describeMoves({ moves, kept, complete }, now, apply, searchAll) {
  if (!moves.length) {
    if (now.memory.fits) return [h("p", { class: "note" }, "No single change of this layout is faster.")];
    if (complete) return [h("p", { class: "note" }, "No layout of this model and batch fits in this cluster.")];
    return [h("p", { class: "note" }, "No layout near this one fits."),
      button("Search all layouts, up to a minute", searchAll)];
  }
  const about = kept === null ? `${now.memory.fits ? "Single changes that are faster and fit" : "Nearest that fits: single changes"}, the fastest first:`
    : kept.length ? `No single change fits. Nearest that fits, with the same ${kept.join(", ")}:`
      : "The best layouts of a search of the cluster:";
  return [h("p", { class: "note" }, about), table(["change", "step", "", "MFU", "memory", ""], moves.map((move) => [
    move.name, show.seconds(move.seconds), `${move.change > 0 ? "+" : "−"}${show.percent(Math.abs(move.change))}`,
    show.percent(move.mfu), show.bytes(move.reserved),
    button("Apply", () => apply(move.parallel), { class: "small", "aria-label": `Apply ${move.name}` }),
  ]), { words: [0] })];
}

function summary({ model, cluster, layout, step, mfu, memory, training }) {
  return {
    model: model.name, cluster: `${show.count(cluster.devices)} × ${cluster.accelerator}`, layout: layout.text, seconds: step.seconds, mfu: mfu.value,
    reserved: memory.reserved, fits: memory.fits, dollars: training.dollars,
  };
}

function pinTable(rows, remove, open) {
  const best = Math.min(...rows.filter(({ row }) => row.fits).map(({ row }) => row.seconds));
  return h("div", { class: "scroll" }, h("table", { class: "pins" },
    h("thead", {}, h("tr", {}, ["", "model and layout", "step", "MFU", "memory", "cost", ""].map((name, i) =>
      h("th", { scope: "col", class: i === 1 ? "words" : "" }, name)))),
    h("tbody", {}, rows.map(({ name, row, state }, i) => h("tr", {},
      h("td", {}, name),
      h("td", { class: "words" }, `${row.model}, ${row.cluster}`, h("br"), h("small", {}, row.layout)),
      h("td", {}, row.seconds === best && rows.length > 1 ? h("b", {}, show.seconds(row.seconds)) : show.seconds(row.seconds)),
      h("td", {}, show.percent(row.mfu)),
      h("td", { class: row.fits ? "" : "bad" }, show.bytes(row.reserved), row.fits ? "" : " too much"),
      h("td", {}, row.dollars ? show.dollars(row.dollars) : "no price"),
      h("td", {}, i ? h("span", { class: "row" }, button("Open", () => open(state), { class: "small", "aria-label": `Open ${name}` }),
        button("Remove", () => remove(i - 1), { class: "small", "aria-label": `Remove ${name}` })) : ""))))));
}

function writeFiles(body, { toml, commands }) {
  redraw(body,
    h("p", { class: "note" }, "Save this as run.toml; shoal train, verify and estimate read it."), copyable(toml, "run.toml"),
    copyable(commands.join("\n"), "commands"));
}

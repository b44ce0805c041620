// Timeline panel: a simulated step of one pipeline schedule, or of two above each other, played.
import { canvas, choice, h, latest, legend, refusal, show, slider, text, tile } from "lab/kit";
import { canvasColours, number, playback, range, unpack } from "lab/drawing";

export const title = "Timeline";

export const defaults = {
  schedule: "1f1b", csv: "", compare: "zb-h1", pp: 4, microbatches: 8, virtual_stages: 2, slices: 1,
  forward: 1, backward_input: 1, backward_weight: 1, link: 0.1,
};

const GUTTER = 58, RIGHT = 8, AXIS = 22;
const PLAY_SECONDS = 9; // of a whole step
const HINT = "Point at a micro-batch, or move with the arrow keys, to see its path.";
const FORWARD = 0, WEIGHT_HALF = 3; // codes of ops, as in shoal.pipeline.simulator.columns
const units = (value) => `${number(value)} T`;

export async function mount(element, state, api, onState) {
  const { schedules } = await api("schedules", {});
  const names = schedules.map((each) => each.name);
  let now = Infinity; // the time that is played to; Infinity shows all
  const rows = [scheduleRow(), scheduleRow()];
  const span = () => Math.max(1e-9, ...rows.map((each) => each.answer?.step_time ?? 0));

  // ---- controls ----

  function change(changed) {
    Object.assign(state, changed);
    onState(state);
    ask();
  }
  const count = (key, label, values) => slider({ label, values, value: state[key], onInput: (value) => change({ [key]: value }) });
  const cost = (key, label, most) => slider({
    label, values: range(0, most, 0.05), value: state[key], unit: "T", format: (value) => value.toFixed(2), onInput: (value) => change({ [key]: value }),
  });
  const none = { name: "", text: "none" };
  const sliders = {
    pp: count("pp", "Pipeline ranks", range(1, 64)), microbatches: count("microbatches", "Micro-batches", range(1, 128)),
    virtual_stages: count("virtual_stages", "Stages on each rank", range(1, 8)), slices: count("slices", "Slices of a sequence", range(1, 16)),
  };
  const named = choice({ label: "Schedule", options: names, value: state.schedule, onInput: (schedule) => change({ schedule }) });
  let typing;
  const pasted = text({
    label: "Or your own", value: state.csv, lines: 2, placeholder: "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1",
    help: "A row for each rank, as torch.distributed.pipelining writes it",
    onInput(csv) { clearTimeout(typing); typing = setTimeout(() => change({ csv: csv.trim() }), 250); },
  });
  element.append(
    h("div", { class: "controls" },
      h("fieldset", {}, h("legend", {}, "Schedule"), named.element, pasted.element,
        choice({ label: "Compare with", options: [none, ...names], value: state.compare, onInput: (compare) => change({ compare }) }).element,
        Object.values(sliders).map((each) => each.element)),
      h("fieldset", {}, h("legend", {}, "Time of one micro-batch on one rank"),
        cost("forward", "Forward", 4).element, cost("backward_input", "Backward, input half", 4).element,
        cost("backward_weight", "Backward, weight half", 4).element, cost("link", "Message on a link", 2).element,
        h("p", { class: "note" }, "T is any unit of time. A full backward takes both halves."))));

  // ---- playback ----

  const player = playback({
    label: "Time in the step",
    advance(seconds) {
      now = Math.min(now, span()) + (seconds * span()) / PLAY_SECONDS;
      if (now >= span()) now = Infinity;
      draw();
      return now < span();
    },
    atEnd: () => now >= span(),
    rewind() { now = 0; },
    step(direction) {
      const starts = [...new Set(rows.flatMap((each) => Array.from(each.data?.start ?? [])))].sort((a, b) => a - b);
      const at = Math.min(now, span());
      const found = direction > 0 ? starts.find((time) => time > at + 1e-9) : starts.findLast((time) => time < at - 1e-9);
      now = found ?? (direction > 0 ? Infinity : 0);
      draw();
    },
    seek(part) { now = part >= 1 ? Infinity : part * span(); draw(); },
  });
  function draw() {
    const at = Math.min(now, span());
    player.set(at / span(), `${at.toFixed(2)} of ${span().toFixed(2)} T`);
    for (const each of rows) each.draw();
  }

  // ---- one schedule ----

  function scheduleRow() {
    const tiles = h("div", { class: "tiles" }), heading = h("h2", {}), path = h("p", { class: "note path", "aria-live": "polite" }, HINT), closed = h("p", { class: "note" });
    const key = h("div", {}), refused = h("div", {});
    const lanes = canvas(drawLanes, { height: () => (row.answer ? row.answer.ranks * laneHeight() + AXIS : 10), label: "Timeline" });
    const memory = canvas(drawMemory, { height: 128, label: "Live activations of each rank over time" });
    lanes.canvas.tabIndex = 0;
    const body = h("div", {}, heading, tiles, lanes.element, key, path, memory.element, closed);
    const section = h("section", {}, refused, body);
    const row = { section, answer: null, data: null, at: -1, draw() { lanes.paint(); memory.paint(); } };
    row.ask = latest(api, "timeline", take, (error) => {
      refused.replaceChildren(refusal(error));
      body.hidden = true;
      row.answer = row.data = null;
      draw();
    });
    row.hide = () => { row.answer = row.data = null; section.hidden = true; };

    function take(answer) {
      const data = Object.fromEntries(Object.entries(answer.columns).map(([name, column]) => [name, unpack(column)]));
      data.sent = unpack(answer.sent);
      data.arrived = unpack(answer.arrived);
      data.lane = new Int32Array(data.op.length);
      for (let rank = 0; rank < answer.ranks; rank++) data.lane.fill(rank, data.offset[rank], data.offset[rank + 1]);
      Object.assign(row, { answer, data, at: -1 });
      refused.replaceChildren();
      body.hidden = false;
      path.textContent = HINT;
      closed.textContent = answer.closed_form;
      heading.replaceChildren(`${answer.name} `, h("small", {}, answer.source));
      tiles.replaceChildren(
        tile("Step time", units(answer.step_time)), tile("Bubble", show.percent(answer.bubble), "idle share of the step"),
        tile("Idle over computing", show.percent(answer.bubble_over_ideal)),
        tile("Peak of live activations", number(answer.peak_microbatches), "micro-batches of a rank's layers"));
      const dark = canvasColours().dark;
      key.replaceChildren(legend(answer.legend.map(([paint, name]) => ({ name, colour: answer.paints[paint][dark ? "dark" : "light"] }))));
      lanes.canvas.setAttribute("aria-label", `Timeline of ${answer.name}: step ${units(answer.step_time)}, bubble ${show.percent(answer.bubble)}. Arrow keys move between actions.`);
      draw();
      if (row === rows[0] && state.csv) compare({ pp: answer.ranks, microbatches: answer.microbatches });
    }

    const laneHeight = () => Math.max(7, Math.min(26, Math.floor(520 / row.answer.ranks)));
    const scale = (width) => (time) => GUTTER + (time / span()) * (width - GUTTER - RIGHT);

    function drawLanes(context, width) {
      const { answer, data } = row;
      if (!answer) return;
      const colours = canvasColours(), x = scale(width), high = laneHeight(), bar = high - (high > 12 ? 4 : 1);
      const picked = row.at >= 0 ? data.microbatch[row.at] : -1;
      const paints = answer.paints.map((paint) => (colours.dark ? [paint.dark, paint.darkInk] : [paint.light, paint.lightInk]));
      prepare(context);
      for (let rank = 0; rank < answer.ranks; rank++) {
        context.fillStyle = colours.lane;
        context.fillRect(GUTTER, rank * high, width - GUTTER - RIGHT, bar);
        if (rank % Math.ceil(15 / high) === 0) label(context, colours, `rank ${rank}`, rank * high + bar / 2 + 0.5);
      }
      context.textAlign = "center";
      for (let i = 0; i < data.op.length; i++) {
        const from = data.start[i], to = from + data.length[i], half = data.half[i];
        if (to <= from || from >= now) continue;
        const left = x(from), wide = x(Math.min(to, now)) - left, tall = half ? bar / 2 : bar;
        const top = data.lane[i] * high + (half === 2 ? bar / 2 : 0), [fill, ink] = paints[data.paint[i]];
        context.globalAlpha = picked >= 0 && data.microbatch[i] !== picked ? 0.22 : 1;
        context.fillStyle = fill;
        context.fillRect(left, top, Math.max(0.6, wide - (wide > 4 ? 1 : 0)), tall);
        const text = data.microbatch[i] < 0 ? "" : `${data.microbatch[i]}${data.part[i] < 0 ? "" : `.${data.part[i]}`}`;
        if (text && tall > 10 && wide > 7 * text.length + 3) {
          context.fillStyle = ink;
          context.fillText(text, left + wide / 2, top + tall / 2 + 0.5);
        }
      }
      context.globalAlpha = 1;
      drawMessages(context, x, high, bar, colours, picked);
      if (now < span()) {
        context.fillStyle = colours.ink;
        context.fillRect(x(now) - 0.75, 0, 1.5, answer.ranks * high);
      }
      drawAxis(context, width, answer.ranks * high, colours);
    }

    // The path of the picked micro-batch, and the messages that are on a link now.
    function drawMessages(context, x, high, bar, colours, picked) {
      const { data } = row, middle = (i) => data.lane[i] * high + bar / 2;
      for (let k = 0; k < data.producer.length; k++) {
        const from = data.producer[k], to = data.consumer[k];
        if (picked >= 0 && data.microbatch[from] === picked && data.start[to] < now) {
          context.strokeStyle = colours.ink;
          context.lineWidth = 1.4;
          context.beginPath();
          context.moveTo(x(data.start[from] + data.length[from]), middle(from));
          context.lineTo(x(data.start[to]), middle(to));
          context.stroke();
        }
        if (now < span() && data.sent[k] <= now && now < data.arrived[k]) {
          const part = (now - data.sent[k]) / (data.arrived[k] - data.sent[k]);
          context.fillStyle = colours.accent;
          context.beginPath();
          context.arc(x(now), middle(from) + part * (middle(to) - middle(from)), 4, 0, 7);
          context.fill();
        }
      }
      if (row.at >= 0) {
        const left = x(data.start[row.at]);
        context.strokeStyle = colours.ink;
        context.lineWidth = 2;
        context.strokeRect(left, data.lane[row.at] * high, Math.max(2, x(data.start[row.at] + data.length[row.at]) - left), bar);
      }
    }

    function drawAxis(context, width, y, colours) {
      const x = scale(width), rough = span() / Math.max(2, (width - GUTTER) / 90), power = 10 ** Math.floor(Math.log10(rough));
      const step = power * [1, 2, 5, 10].find((k) => k * power >= rough);
      context.textAlign = "center";
      context.fillStyle = colours.soft;
      for (let at = 0; at <= span() * 1.0001; at += step) {
        context.fillRect(x(at), y, 1, 4);
        context.fillText(number(at), Math.min(x(at), width - 14), y + 13);
      }
      label(context, colours, "time [T]", y + 13);
    }

    function drawMemory(context, width, height) {
      const { answer, data } = row;
      if (!answer) return;
      const colours = canvasColours(), x = scale(width), most = Math.max(1e-9, ...rows.map((each) => each.answer?.peak_microbatches ?? 0));
      const base = height - 8, y = (live) => base - (live * answer.share * (base - 26)) / most;
      const chosen = row.at >= 0 ? data.lane[row.at] : -1;
      prepare(context);
      for (const value of [0, most / 2, most]) {
        const at = base - (value * (base - 26)) / most;
        context.fillStyle = colours.line;
        context.fillRect(GUTTER, at, width - GUTTER - RIGHT, 1);
        label(context, colours, number(value), at);
      }
      context.textAlign = "left";
      context.fillText(width > 560 ? "live activations of each rank, in micro-batches of its layers; first rank blue, last orange" : "live activations of each rank [micro-batches]", GUTTER, 8);
      for (let rank = 0; rank < answer.ranks; rank++) {
        const part = answer.ranks > 1 ? rank / (answer.ranks - 1) : 0;
        context.strokeStyle = `hsl(${215 - 185 * part} ${55 + 20 * part}% ${colours.dark ? 62 : 48}%)`;
        context.globalAlpha = chosen < 0 || chosen === rank ? 0.9 : 0.2;
        context.lineWidth = chosen === rank ? 2.6 : 1.3;
        context.beginPath();
        context.moveTo(x(0), y(0));
        let live = 0;
        for (let i = data.liveOffset[rank]; i < data.liveOffset[rank + 1] && data.liveTime[i] <= now; i++) {
          context.lineTo(x(data.liveTime[i]), y(live));
          live = data.liveValue[i];
          context.lineTo(x(data.liveTime[i]), y(live));
        }
        context.lineTo(x(Math.min(now, answer.step_time)), y(live));
        context.stroke();
      }
      context.globalAlpha = 1;
    }

    // ---- pointing ----

    function pick(i) {
      row.at = i;
      path.textContent = i >= 0 ? describe(i) : HINT;
      row.draw();
    }

    // What an action is, and how its micro-batch goes through the ranks.
    function describe(i) {
      const { data, answer } = row, m = data.microbatch[i], words = answer.paints[data.paint[i]].name;
      const when = `${number(data.start[i])} to ${number(data.start[i] + data.length[i])} T`;
      if (m < 0) return `${words} on rank ${data.lane[i]}: ${when}.`;
      const own = Array.from(data.op.keys()).filter((k) => data.microbatch[k] === m && data.length[k] > 0).sort((a, b) => data.start[a] - data.start[b]);
      const visited = (forward) => {
        const ranks = own.filter((k) => (data.op[k] === FORWARD) === forward && data.op[k] !== WEIGHT_HALF).map((k) => data.lane[k]);
        const each = ranks.filter((rank, k) => rank !== ranks[k - 1]);
        return each.length > 12 ? `${each.slice(0, 5).join(" → ")} → … → ${each.slice(-3).join(" → ")}` : each.join(" → ");
      };
      const begin = data.start[own[0]], end = Math.max(...own.map((k) => data.start[k] + data.length[k]));
      const busy = own.reduce((sum, k) => sum + data.length[k], 0);
      return `Micro-batch ${m}, ${words}, stage ${data.stage[i]} on rank ${data.lane[i]}: ${when}. Forward over ranks ${visited(true)}, `
        + `backward over ${visited(false)}: ${number(end - begin)} T from the first pass to the last, ${number(busy)} T of them computing.`;
    }

    function under(event) {
      const { data, answer } = row;
      if (!answer) return -1;
      const high = laneHeight(), rank = Math.floor(event.offsetY / high), lower = event.offsetY - rank * high > (high - 4) / 2;
      const time = ((event.offsetX - GUTTER) / (lanes.canvas.clientWidth - GUTTER - RIGHT)) * span();
      if (rank < 0 || rank >= answer.ranks) return -1;
      for (let i = data.offset[rank]; i < data.offset[rank + 1]; i++) {
        if (data.half[i] && (data.half[i] === 2) !== lower) continue;
        if (data.start[i] <= time && time < data.start[i] + data.length[i]) return i;
      }
      return -1;
    }

    function move(key) {
      const { data, answer } = row;
      if (row.at < 0) return 0;
      const rank = data.lane[row.at];
      if (key === "ArrowRight" || key === "ArrowLeft") {
        const by = key === "ArrowRight" ? 1 : -1;
        for (let i = row.at + by; i >= data.offset[rank] && i < data.offset[rank + 1]; i += by) if (data.length[i] > 0) return i;
        return row.at;
      }
      const next = rank + (key === "ArrowDown" ? 1 : -1), time = data.start[row.at] + data.length[row.at] / 2;
      if (next < 0 || next >= answer.ranks) return row.at;
      let best = data.offset[next];
      for (let i = best; i < data.offset[next + 1]; i++) if (data.length[i] > 0 && data.start[i] <= time) best = i;
      return best;
    }

    lanes.canvas.addEventListener("pointermove", (event) => { const i = under(event); if (i !== row.at) pick(i); });
    lanes.canvas.addEventListener("pointerleave", () => { if (document.activeElement !== lanes.canvas) pick(-1); });
    lanes.canvas.addEventListener("blur", () => pick(-1));
    lanes.canvas.addEventListener("keydown", (event) => {
      if (!row.data || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "Escape") pick(-1);
      else if (event.key.startsWith("Arrow")) { event.preventDefault(); pick(move(event.key)); }
    });
    return row;
  }

  // ---- together ----

  function ask() {
    const used = schedules.filter((each) => (each.name === state.schedule && !state.csv) || each.name === state.compare);
    for (const key of ["virtual_stages", "slices"]) sliders[key].enable(used.some((each) => each[key]));
    for (const each of [named, sliders.pp, sliders.microbatches]) each.enable(!state.csv);
    const { compare: other, ...request } = state;
    rows[0].ask(request);
    if (!state.csv) compare({}); // else with the sizes of the pasted one, once they are known
  }
  function compare(sizes) {
    const { compare: schedule, ...request } = state;
    rows[1].section.hidden = !schedule || (schedule === state.schedule && !state.csv);
    if (rows[1].section.hidden) { rows[1].hide(); draw(); } else rows[1].ask({ ...request, ...sizes, schedule, csv: "" });
  }

  element.append(h("div", { class: "answers" }, player.element, rows.map((each) => each.section)));
  ask();
  return { unmount: player.pause };
}

function prepare(context) {
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
}

function label(context, colours, text, y) {
  context.fillStyle = colours.soft;
  context.textAlign = "right";
  context.fillText(text, GUTTER - 8, y);
}

// Sharding panel: an expression of sharded arrays, its routes with prices, who holds what at each step, and a run.
import { button, choice, h, latest, redraw, refusal, s, show, text, tile } from "lab/kit";
import { number, playback, table } from "lab/drawing";

export const title = "Sharding";

export const defaults = {
  expression: "A[I, Jx] * B[Jx, K] -> C[I, K]", mesh: "x=4", sizes: "", dtype: "bf16", topology: "full", link: "nvlink-4",
  accelerator: "h100-sxm", route: 0,
};

const STEP_SECONDS = 1.4;
const SIDE = 46, GAP = 8; // of a device's picture of an array [pixels]

export async function mount(element, state, api, onState) {
  const known = await api("sharding-choices", {});
  let answer = null, step = 0, clock = 0; // step: how many steps of the route are done

  // ---- controls ----

  function change(changed) {
    Object.assign(state, { route: 0 }, changed);
    onState(state);
    ask();
  }
  let typing;
  function type(changed) { // a run of typed letters is one change
    clearTimeout(typing);
    typing = setTimeout(() => change(changed), 250);
  }
  const write = (key, label, placeholder) => text({ label, value: state[key], placeholder, onInput: (value) => type({ [key]: value }) });
  const pick = (key, label, options) => choice({ label, options, value: state[key], onInput: (value) => change({ [key]: value }) });
  const expression = text({ label: "Expression", value: state.expression, lines: 2, onInput: (value) => type({ expression: value.replace(/\s+/g, " ") }) });
  const mesh = write("mesh", "Mesh", "x=4,y=2"), sizes = write("sizes", "Sizes", "I=256,J=2048");
  const example = choice({
    label: "Example", value: "", options: [{ name: "", text: "choose one" }, ...known.examples.map(([name]) => name)],
    onInput(name) {
      const [, typed, devices] = known.examples.find(([own]) => own === name);
      expression.set(typed);
      mesh.set(devices);
      sizes.set("");
      change({ expression: typed, mesh: devices, sizes: "" });
    },
  });
  element.append(h("div", { class: "controls" },
    h("fieldset", {}, h("legend", {}, "Product"), example.element, expression.element, mesh.element, sizes.element, pick("dtype", "Format", known.dtypes).element,
      h("p", { class: "note" }, "Upper-case letters are dims, lower-case letters after them the mesh axes that shard them: A[Ix, J]. C[I, K]{Ux} is a sum along x that is not added up yet. Dims without a size have 4096.")),
    h("fieldset", {}, h("legend", {}, "Network"), pick("topology", "Network", known.topologies).element, pick("link", "Link", known.links).element,
      pick("accelerator", "Accelerator", known.accelerators).element)));

  // ---- steps ----

  const player = playback({
    label: "Step of the route",
    advance(seconds) {
      clock += seconds;
      if (clock > STEP_SECONDS) { clock = 0; step += 1; frame(); }
      return step < route().steps.length;
    },
    atEnd: () => step >= route().steps.length,
    rewind() { step = 0; clock = STEP_SECONDS / 2; frame(); },
    step(direction) { step = Math.max(0, Math.min(route().steps.length, step + direction)); frame(); },
    seek(part) { step = Math.round(part * route().steps.length); frame(); },
  });
  const list = h("ol", { class: "steps" });
  const devices = h("div", { class: "devices" });
  const key = h("p", { class: "note" }, "Filled: the part of the array that the device holds. Dashed: what it holds is a term of a sum.");
  const routes = h("section", {}), tiles = h("div", { class: "tiles" }), cases = h("p", { class: "note" }), where = h("small", {});
  const refused = h("div", {}), trouble = h("div", {});
  const run = button("Run this route on real processes", runRoute, { class: "main" });
  const result = h("p", { class: "result", "aria-live": "polite" });

  const route = () => answer.routes[Math.min(state.route, answer.routes.length - 1)] ?? { steps: [], seconds: 0 };

  /** The state of each array after some steps, by its name. */
  function held(done) {
    const found = new Map(), steps = route().steps, coming = new Set(); // coming: products that are not taken yet
    const put = (name) => found.set(answer.states[name].array, name);
    const missing = (name) => !found.has(answer.states[name].array) && !coming.has(answer.states[name].array);
    for (const [i, one] of steps.entries()) {
      if (i < done) { put(one.after); continue; }
      one.before.filter(missing).forEach(put);
      if (one.what === "multiply") coming.add(one.array);
    }
    const given = answer.routes.length ? answer.arrays.slice(0, -1) : answer.arrays;
    given.filter(missing).forEach(put);
    return found;
  }

  let drawn = null;
  function build() {
    const arrays = [...new Set(Object.values(answer.states).map((each) => each.array))], colours = ["--blue", "--orange", "--teal", "--plum", "--violet", "--yellow"];
    const wide = arrays.length * (SIDE + GAP) - GAP;
    drawn = [];
    devices.style.setProperty("--wide", `${wide + 24}px`);
    devices.replaceChildren(...Array.from({ length: answer.ranks }, (_, device) => {
      const parts = arrays.map((name, i) => ({
        name, x: i * (SIDE + GAP), part: s("rect", { class: "part", style: { fill: `var(${colours[i % colours.length]})`, x: `${i * (SIDE + GAP)}px`, opacity: 0 } }),
        words: s("text", { x: i * (SIDE + GAP) + SIDE / 2, y: SIDE + 13, class: "tick", "text-anchor": "middle" }, name),
      }));
      drawn.push(parts);
      return h("figure", { class: "device" }, h("figcaption", {}, `device ${device}`),
        s("svg", { viewBox: `0 0 ${wide} ${SIDE + 16}`, width: wide, height: SIDE + 16 }, parts.map(({ x, part, words }) => [
          s("rect", { x: x + 0.5, y: 0.5, width: SIDE - 1, height: SIDE - 1, class: "whole" }), part, words,
        ]).flat()));
    }));
  }

  function frame() {
    const now = held(step), side = SIDE - 1;
    for (const [device, parts] of drawn.entries()) {
      for (const { name, x, part, words } of parts) {
        const state = now.has(name) ? answer.states[now.get(name)] : null;
        const block = state ? state.holders.findIndex((terms) => terms.some((ranks) => ranks.includes(device))) : -1;
        part.style.opacity = block < 0 ? 0 : 1;
        words.style.opacity = block < 0 ? 0.35 : 1;
        if (block < 0) continue;
        const [row, column] = [Math.floor(block / state.right), block % state.right], sum = state.holders[block].length > 1;
        part.style.x = `${x + 0.5 + (column * side) / state.right}px`;
        part.style.y = `${0.5 + (row * side) / state.down}px`;
        part.style.width = `${side / state.right}px`;
        part.style.height = `${side / state.down}px`;
        part.classList.toggle("sum", sum);
      }
    }
    const steps = route().steps.length;
    player.set(steps ? step / steps : 1, `${step} of ${steps} steps`);
    for (const [i, item] of [...list.children].entries()) {
      item.classList.toggle("done", i < step);
      if (i === step) item.setAttribute("aria-current", "step"); else item.removeAttribute("aria-current");
    }
  }

  function take(given) {
    answer = given;
    player.pause();
    refused.replaceChildren();
    trouble.replaceChildren();
    result.textContent = "";
    body.hidden = false;
    step = 0;
    const best = answer.routes[0], chosen = route();
    cases.textContent = answer.cases.join(" · ");
    where.textContent = `${answer.ranks} devices, ${answer.mesh}; ${Object.entries(answer.dims).map(([name, size]) => `${name} = ${size}`).join(", ")}; ${answer.network}`;
    tiles.replaceChildren(...(answer.routes.length ? [
      tile("Time of the route", show.seconds(chosen.seconds), "nothing overlapped"), tile("Products", show.seconds(chosen.compute)),
      tile("Collectives", show.seconds(chosen.moving)), tile("Sent by a device", show.bytes(chosen.sent), "the busiest one"),
      tile("Over the cheapest", best.seconds ? `${number(chosen.seconds / best.seconds)} x` : "1 x"),
    ] : answer.arrays.map((name) => tile(name, show.bytes(answer.states[name].bytes), "on each device"))));
    routes.hidden = !answer.routes.length;
    redraw(routes, h("h2", {}, answer.routes.length === 1 ? "The cheapest moves" : `${answer.routes.length} legal routes, the cheapest first`), table(
      ["route", "multiplied as", "collectives", "products", "collectives", "together", "each sends"],
      answer.routes.map((each, i) => [
        button(`${i + 1}`, () => { state.route = i; onState(state); take(answer); }, { class: "small", "aria-label": `Route ${i + 1}`, "aria-pressed": String(i === state.route) }),
        each.multiplied.join("; ") || "–", each.collectives.join("; ") || "none", show.seconds(each.compute), show.seconds(each.moving), show.seconds(each.seconds), show.bytes(each.sent),
      ]),
      { best: state.route, words: [1, 2] },
    ));
    list.replaceChildren(...chosen.steps.map((one) => h("li", {}, h("b", {}, one.what), ` ${one.before.join(" * ")} → ${one.after}`,
      h("small", {}, one.algorithm ? ` ${one.algorithm}, ${show.bytes(one.sent)} from a device, ${show.seconds(one.seconds)}` : ` ${one.seconds ? show.seconds(one.seconds) : "nothing is sent"}`))));
    player.enable(chosen.steps.length > 0);
    run.disabled = !answer.can_run || api.saved;
    build();
    frame();
  }

  async function runRoute() {
    const asked = answer;
    run.disabled = true;
    trouble.replaceChildren();
    result.textContent = `Starting ${answer.ranks} processes …`;
    try {
      const found = await api("run-route", { ...state });
      if (answer !== asked) return;
      const errors = Object.entries(found.errors).map(([name, error]) => `${name} by at most ${error === 0 ? "0" : error.toExponential(1)}`).join(", ");
      result.textContent = `${found.equal ? "Equal" : "Not equal"} to the plain result. Run on ${found.ranks} processes in float64, every dim ${found.size}: ${errors} (limit ${found.limit.toExponential(0)}); ${number(found.seconds)} s with the start of the processes.`;
      result.className = found.equal ? "result good" : "result bad";
    } catch (error) {
      result.textContent = "";
      trouble.replaceChildren(refusal(error));
    }
    run.disabled = !answer.can_run;
  }

  const send = latest(api, "sharding", take, (error) => { player.pause(); refused.replaceChildren(refusal(error)); body.hidden = true; });
  function ask() {
    const { route: _, ...request } = state; // the route is a choice among the answers
    send(request);
  }
  const body = h("div", { class: "answers", hidden: true }, tiles,
    h("section", {}, h("h2", {}, "Who holds what ", where), cases, player.element, h("div", { class: "row" }, run, result), trouble,
      h("div", { class: "pair" }, h("div", {}, list, key), devices)),
    routes);
  element.append(h("div", { class: "answers" }, refused, body));
  ask();
  return { unmount() { player.pause(); clearTimeout(typing); } };
}

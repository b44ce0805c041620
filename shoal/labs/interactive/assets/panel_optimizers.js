// Optimizers panel: paths of update rules over a small surface, and the loss along each.
import { check, choice, COLOURS, h, latest, refusal, s, show, slider, tile } from "lab/kit";
import { number, playback, plot, powersOfTen, range, table } from "lab/drawing";

export const title = "Optimizers";

export const defaults = {
  surface: "a narrow valley", rules: ["sgd", "momentum", "adam"], rate: 0.05, momentum: 0.9, beta1: 0.9, beta2: 0.95, steps: 60,
};

const PLAY_SECONDS = 6;

export async function mount(element, state, api, onState) {
  const known = await api("surfaces", {});
  let answer = null, at = Infinity; // steps that are shown
  const names = known.rules.map((rule) => rule.name);
  const own = (name) => `var(${COLOURS[names.indexOf(name) % COLOURS.length]})`;
  const dash = (name) => (names.indexOf(name) >= COLOURS.length ? "5 3" : undefined);

  // ---- controls ----

  function change(changed) {
    Object.assign(state, changed);
    onState(state);
    write();
    ask({ ...state });
  }
  const slide = (key, label, values, format) => slider({ label, values, value: state[key], format, onInput: (value) => change({ [key]: value }) });
  const share = [...range(0, 0.95, 0.05), 0.98, 0.99, 0.995, 0.999];
  const sliders = {
    rate: slide("rate", "Learning rate", powersOfTen(0.001, 10, 20), (value) => number(value)),
    momentum: slide("momentum", "Momentum", share), beta1: slide("beta1", "β₁, mean of gradients", share),
    beta2: slide("beta2", "β₂, mean of their squares", share), steps: slide("steps", "Steps", range(5, 400, 5)),
  };
  const boxes = known.rules.map((rule) => check({
    label: rule.name, value: state.rules.includes(rule.name),
    onInput(on) {
      const rules = names.filter((name) => (name === rule.name ? on : state.rules.includes(name)));
      if (rules.length) change({ rules }); else boxes[names.indexOf(rule.name)].set(true);
    },
  }));
  function write() {
    const reads = (setting) => known.rules.some((rule) => rule[setting] && state.rules.includes(rule.name));
    sliders.momentum.enable(reads("momentum"));
    for (const key of ["beta1", "beta2"]) sliders[key].enable(reads("betas"));
  }
  write();
  element.append(h("div", { class: "controls" },
    h("fieldset", {}, h("legend", {}, "Surface"), choice({ label: "Surface", options: known.surfaces, value: state.surface, onInput: (surface) => change({ surface }) }).element),
    h("fieldset", {}, h("legend", {}, "Settings of all rules"), Object.values(sliders).map((each) => each.element)),
    h("fieldset", {}, h("legend", {}, "Update rules"), h("div", { class: "checks" }, boxes.map((each) => each.element)))));

  // ---- answers ----

  const map = plot(describeMap, "Contours of the surface, and the path of each rule");
  const losses = plot(describeLosses, "Loss after each step of each rule");
  const heading = h("h2", {}), tiles = h("div", { class: "tiles" }), ends = h("div", {}), refused = h("div", {});
  const player = playback({
    label: "Step",
    advance(seconds) {
      at = Math.min(state.steps, Math.min(at, state.steps) + (seconds * state.steps) / PLAY_SECONDS);
      draw();
      return at < state.steps;
    },
    atEnd: () => at >= state.steps,
    rewind() { at = 0; },
    step(direction) { at = Math.max(0, Math.min(state.steps, Math.round(Math.min(at, state.steps)) + direction)); draw(); },
    seek(part) { at = part * state.steps; draw(); },
  });
  const shown = () => Math.floor(Math.min(at, state.steps));

  function draw() {
    player.set(shown() / state.steps, `${shown()} of ${state.steps} steps`);
    map.draw();
    losses.draw();
  }

  function describeMap() {
    if (!answer) return null;
    const { box, contours, start } = answer.surface, [left, bottom, right, top] = box;
    const most = contours.length;
    return {
      ratio: 0.62, left: 40, x: { low: left, high: right, label: "x" }, y: { low: bottom, high: top, label: "y" },
      under(group, X, Y) {
        contours.forEach(([level, lines], i) => lines.forEach((line) => group.append(s("path", {
          d: line.map(([x, y], k) => `${k ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`).join(""), class: "contour", style: { opacity: 0.85 - (0.6 * i) / most },
        }, s("title", {}, `loss ${number(level)}`)))));
        group.append(s("circle", { cx: X(start[0]), cy: Y(start[1]), r: 6, class: "start" }, s("title", {}, "start")));
      },
      series: Object.entries(answer.paths).map(([name, path]) => ({ name, colour: own(name), dash: dash(name), dots: state.steps > 150 ? 0 : 2, points: path.points.slice(0, shown() + 1) })),
      marks: Object.entries(answer.paths).map(([, path]) => path.points[Math.min(shown(), path.points.length - 1)]).map(([x, y]) => ({ x, y, words: "" })),
    };
  }

  function describeLosses() {
    if (!answer) return null;
    const every = Object.values(answer.paths).flatMap((path) => path.losses), first = Object.values(answer.paths)[0].losses[0];
    const low = Math.min(...every), high = Math.max(first * 1.25, low + 1e-9);
    return {
      height: 260, x: { low: 0, high: state.steps, label: "step" }, y: { low: low - 0.04 * (high - low), high, label: "loss" },
      series: Object.entries(answer.paths).map(([name, path]) => ({ name, colour: own(name), dash: dash(name), points: path.losses.slice(0, shown() + 1).map((loss, i) => [i, loss]) })),
    };
  }

  function take(given) {
    answer = given;
    refused.replaceChildren();
    body.hidden = false;
    heading.replaceChildren(`${answer.surface.name} `, h("small", {}, `loss = ${answer.surface.formula}; the ring is the start`));
    const order = Object.entries(answer.paths).sort(([, a], [, b]) => (a.diverged ? Infinity : a.losses.at(-1)) - (b.diverged ? Infinity : b.losses.at(-1)));
    const [bestName, best] = order[0];
    tiles.replaceChildren(
      tile("Least loss at the end", best.diverged ? "none" : bestName, best.diverged ? "all diverge" : number(best.losses.at(-1))),
      tile("Loss at the start", number(best.losses[0])), tile("Learning rate", number(state.rate)), tile("Steps", String(state.steps)));
    ends.replaceChildren(table(["rule", "x at the end", "y at the end", "loss at the end", "steps to a tenth of the first loss"], order.map(([name, path]) => {
      const tenth = path.losses.findIndex((loss) => loss <= path.losses[0] / 10), [x, y] = path.points.at(-1);
      return path.diverged ? [name, "–", "–", `diverges in step ${path.points.length}`, "–"] : [name, number(x), number(y), number(path.losses.at(-1)), tenth < 0 ? "–" : String(tenth)];
    })));
    draw();
  }

  const ask = latest(api, "optimizers", take, (error) => { player.pause(); refused.replaceChildren(refusal(error)); body.hidden = true; });
  const body = h("div", { class: "answers", hidden: true }, tiles,
    h("section", {}, heading, player.element, h("div", { class: "pair wide" }, map.element, losses.element), ends));
  element.append(h("div", { class: "answers" }, refused, body));
  ask({ ...state });
  return { unmount: player.pause };
}

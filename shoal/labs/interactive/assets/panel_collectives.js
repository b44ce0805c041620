// Collectives panel: the rounds of one algorithm on a network, and the time of all algorithms over the size.
import { button, choice, COLOURS, h, latest, redraw, refusal, s, show, slider, tile } from "lab/kit";
import { number, playback, plot, powersOfTen, range, table } from "lab/drawing";

export const title = "Collectives";

export const defaults = {
  collective: "all-reduce", algorithm: "", ranks: 8, root: 0, topology: "ring", link: "infiniband-ndr", size: 16e6,
};

const ROUND_SECONDS = 0.9; // of a round, played
const LONGEST = 24; // seconds of all rounds, played
const FASTEST = { name: "", text: "the fastest" };

export async function mount(element, state, api, onState) {
  const known = await api("networks", {});
  let answer = null, at = 0; // rounds that are done, with the part of the one under way

  // ---- controls ----

  function change(changed) {
    Object.assign(state, changed);
    if ("collective" in changed) state.algorithm = "";
    if (state.root >= state.ranks) state.root = 0;
    write();
    onState(state);
    ask({ ...state });
  }
  const pick = (key, label, options) => choice({ label, options, value: state[key], onInput: (value) => change({ [key]: value }) });
  const slide = (key, label, values, more = {}) => slider({ label, values, value: state[key], onInput: (value) => change({ [key]: value }), ...more });
  const controls = {
    collective: pick("collective", "Collective", Object.keys(known.collectives)),
    algorithm: pick("algorithm", "Algorithm", [FASTEST]),
    topology: pick("topology", "Network", known.topologies),
    link: pick("link", "Link", known.links),
    ranks: slide("ranks", "Ranks", range(2, 32)),
    root: slide("root", "Root", range(0, 31)),
    size: slide("size", "Size S", powersOfTen(100, 1e10, 20), { format: show.bytes, help: "Largest input or output of one rank" }),
  };
  function write() {
    controls.algorithm.set(state.algorithm, [FASTEST, ...known.collectives[state.collective]]);
    controls.root.set(state.root, range(0, state.ranks - 1));
    controls.root.enable(known.rooted.includes(state.collective));
  }
  write();
  element.append(h("div", { class: "controls" },
    h("fieldset", {}, h("legend", {}, "Collective"), controls.collective.element, controls.algorithm.element, controls.size.element, controls.root.element,
      h("p", { class: "note" }, "S is the largest input or output of one rank.")),
    h("fieldset", {}, h("legend", {}, "Network"), controls.topology.element, controls.link.element, controls.ranks.element)));

  // ---- rounds ----

  const network = h("figure", { class: "network", role: "img", "aria-label": "The network, and the messages of the round" });
  const matrix = h("figure", { class: "matrix", role: "img", "aria-label": "Which rank holds which block" });
  const words = h("p", { class: "note", "aria-live": "polite" });
  const tiles = h("div", { class: "tiles" }), where = h("small", {}), costs = h("div", {}), refused = h("div", {});
  const times = plot(describeTimes, "Time over size of each algorithm, on logarithmic axes");
  const player = playback({
    label: "Round",
    advance(seconds) {
      at = Math.min(answer.rounds.length, at + seconds / Math.min(ROUND_SECONDS, LONGEST / answer.rounds.length));
      frame();
      return at < answer.rounds.length;
    },
    atEnd: () => at >= answer.rounds.length,
    rewind() { at = 0; },
    step(direction) { at = Math.max(0, Math.min(answer.rounds.length, direction > 0 ? Math.floor(at) + 1 : Math.ceil(at) - 1)); frame(); },
    seek(part) { at = part * answer.rounds.length; frame(); },
  });

  const hue = (block) => `hsl(${(360 * block) / answer.blocks} 52% 55%)`;
  let drawn = null;                                    // elements that move: chunks, and the cells of the matrix

  function build() {
    const width = network.clientWidth || 600, height = Math.min(width, answer.topology.startsWith("ring") || answer.topology.startsWith("fully") ? 420 : 340);
    const place = places(answer, width, height), radius = Math.max(4.5, Math.min(17, (0.36 * Math.PI * Math.min(width, height)) / answer.ranks, 0.4 * gap(place)));
    const root = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height });
    const most = Math.max(...answer.edges.map((edge) => edge[2]), 1e-9), seen = new Map();
    for (const [from, to, load] of answer.edges) {
      const key = [from, to].sort().join();
      seen.set(key, [from, to, Math.max(load, seen.get(key)?.[2] ?? 0)]);
    }
    for (const { route } of answer.rounds.flatMap((round) => round.messages)) { // a rank's way to its network adapter
      const pair = [route[0], route[1]];
      if (!seen.has([...pair].sort().join())) seen.set([...pair].sort().join(), [...pair, 0]);
    }
    for (const [from, to, load] of seen.values()) {
      const [a, b] = [place.get(from), place.get(to)];
      root.append(s("line", { x1: a.x, y1: a.y, x2: b.x, y2: b.y, class: load ? "wire" : "wire idle", "stroke-width": load ? 1 + (3 * load) / most : 1 },
        s("title", {}, `${from} – ${to}: ${load ? `${number(load)} S` : "nothing"} each way at most`)));
    }
    for (const [name, { x, y }] of place) {
      const rank = name.startsWith("rank ");
      if (rank) {
        root.append(s("circle", { cx: x, cy: y, r: radius, class: "rank" }));
        if (radius > 7) root.append(s("text", { x, y: y + 4, class: "tick", "text-anchor": "middle" }, name.slice(5)));
      } else {
        root.append(s("rect", { x: x - 5, y: y - 5, width: 10, height: 10, rx: 2, class: "switch" }, s("title", {}, name)));
        if (answer.ranks <= 16 || !name.includes("nic")) root.append(s("text", { x: x + 9, y: y + 4, class: "tick" }, name));
      }
    }
    const chunks = s("g", {});
    root.append(chunks);
    network.replaceChildren(root);
    drawn = { place, chunks, radius, round: -1, parts: [], cells: buildMatrix() };
  }

  function buildMatrix() {
    const width = matrix.clientWidth || 400, left = 52, top = 20;
    const side = Math.max(4, Math.min(40, (width - left - 4) / answer.blocks)), high = Math.max(9, Math.min(30, 400 / answer.ranks));
    const root = s("svg", { viewBox: `0 0 ${width} ${top + high * answer.ranks + 4}`, width, height: top + high * answer.ranks + 4 });
    const all = [];
    root.append(s("text", { x: left, y: 12, class: "tick" }, answer.collective === "all-to-all" ? "blocks of its output, by the rank they come from" : `${answer.copies ? "copies of the vector" : "blocks"}: filled when complete`));
    for (let rank = 0; rank < answer.ranks; rank++) {
      if (rank % Math.ceil(13 / high) === 0) root.append(s("text", { x: left - 6, y: top + high * (rank + 0.5) + 4, class: "tick", "text-anchor": "end" }, `rank ${rank}`));
      for (let block = 0; block < answer.blocks; block++) {
        root.append(s("rect", { x: left + side * block, y: top + high * rank, width: Math.max(2, side - 1.5), height: high - 1.5, class: "empty" }));
        const cell = s("rect", { x: left + side * block, y: top + high * rank, width: Math.max(2, side - 1.5), height: high - 1.5, fill: hue(block) }, s("title", {}, ""));
        all.push([cell, rank, block]);
        root.append(cell);
      }
    }
    matrix.replaceChildren(root);
    return all;
  }

  function frame() {
    if (!answer) return;
    if (!drawn) build();
    const rounds = answer.rounds, done = Math.min(rounds.length, Math.floor(at)), part = at - done, now = rounds[done];
    player.set(at / rounds.length, `${done} of ${rounds.length} rounds`);
    if (drawn.round !== done) {
      drawn.round = done;
      for (const [cell, rank, block] of drawn.cells) {
        const full = answer.held[done][rank][block];
        cell.setAttribute("fill-opacity", full ? 0.15 + 0.85 * full : 0);
        cell.firstChild.textContent = `rank ${rank}, block ${block}: ${full === 0 ? "not held" : full >= 1 ? "complete" : `${Math.round(full * answer.ranks)} of ${answer.ranks} terms`}`;
      }
      drawn.parts = (now?.messages ?? []).map((message) => {
        const size = Math.max(8, Math.min(16, drawn.radius * 1.1));
        const chunk = s("g", {}, s("rect", { x: -size / 2, y: -size / 2, width: size, height: size, rx: 2.5, fill: hue(message.first), class: "chunk" }, s("title", {}, `rank ${message.source} → rank ${message.target}: ${message.blocks} block${message.blocks > 1 ? "s" : ""}${message.reduce ? ", added" : ""}`)));
        if (size > 11) chunk.append(s("text", { y: 3.5, class: "inside", "text-anchor": "middle" }, message.reduce ? "+" : message.blocks > 1 ? String(message.blocks) : ""));
        return [chunk, message.route.map((name) => drawn.place.get(name))];
      });
      drawn.chunks.replaceChildren(...drawn.parts.map(([chunk]) => chunk));
      words.textContent = now
        ? `Round ${done + 1} of ${rounds.length}: ${shorten(now.words)}; ${show.seconds(now.seconds)}.`
        : `All ${rounds.length} rounds are done: ${show.seconds(rounds.reduce((sum, round) => sum + round.seconds, 0))} in all.`;
    }
    for (const [chunk, path] of drawn.parts) {
      const [x, y] = along(path, part);
      chunk.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
    }
  }

  // ---- costs ----

  function describeTimes() {
    if (!answer) return null;
    const names = Object.keys(answer.times), sizes = answer.sizes;
    const own = (name) => `var(${COLOURS[names.indexOf(name) % COLOURS.length]})`;
    const every = names.flatMap((name) => answer.times[name]);
    const marks = answer.fastest.slice(1).filter(([size]) => size > sizes[0] && size < sizes[sizes.length - 1]).map(([size, name]) => ({ x: size, y: interpolate(sizes, answer.times[name], size), words: `${name} from ${show.bytes(size)}` }));
    return {
      height: 330, x: { low: sizes[0], high: sizes[sizes.length - 1], log: true, label: "S, bytes of the largest input or output of a rank", show: show.bytes },
      y: { low: Math.min(...every, ...answer.bound.filter((value) => value > 0)) * 0.8, high: Math.max(...every) * 1.2, log: true, label: "time", show: show.seconds },
      series: [
        ...names.map((name, i) => ({ name, colour: own(name), dash: i < COLOURS.length ? undefined : "5 3", wide: name === answer.algorithm, points: sizes.map((size, i) => [size, answer.times[name][i]]) })),
        { name: "lower bound", colour: "var(--ink)", dash: "4 4", points: sizes.map((size, i) => [size, answer.bound[i]]) },
      ],
      marks,
      under(root, X, Y) {
        root.append(s("line", { x1: X(state.size), x2: X(state.size), y1: 0, y2: 400, class: "now" }, s("title", {}, `S = ${show.bytes(state.size)}`)));
      },
    };
  }

  function take(given) {
    const same = answer && ["algorithm", "ranks", "collective", "topology"].every((key) => answer[key] === given[key]);
    answer = given;
    refused.replaceChildren();
    body.hidden = false;
    if (!same) { player.pause(); at = 0; }
    drawn = null;
    const own = answer.algorithms[answer.algorithm];
    tiles.replaceChildren(
      tile(state.algorithm ? "Algorithm" : "Fastest algorithm", answer.algorithm),
      tile("Time", show.seconds(own.seconds), `for S = ${show.bytes(state.size)}`), tile("Rounds", String(own.rounds)),
      tile("Over the lower bound", `${number(own.seconds / answer.bound_seconds)} x`, show.seconds(answer.bound_seconds)));
    where.textContent = `${answer.topology}; ${answer.wire}`;
    const order = Object.entries(answer.algorithms).sort(([, a], [, b]) => a.seconds - b.seconds);
    redraw(costs, table(
      ["algorithm", "rounds", "sent in turn [S]", "added in turn [S]", "sent by all [S]", "time"],
      order.map(([name, one]) => [
        button(name, () => change({ algorithm: name }), { class: "small", "aria-pressed": String(name === answer.algorithm) }),
        String(one.rounds), number(one.volume), number(one.reduced), number(one.total), show.seconds(one.seconds),
      ]),
      { best: order.findIndex(([name]) => name === answer.algorithm) },
    ));
    frame();
    times.draw();
  }

  const ask = latest(api, "collectives", take, (error) => { player.pause(); refused.replaceChildren(refusal(error)); body.hidden = true; });
  const body = h("div", { class: "answers", hidden: true }, tiles,
    h("section", {}, h("h2", {}, "Round by round ", where), player.element, words, h("div", { class: "pair" }, network, matrix)),
    h("section", {}, h("h2", {}, "Time over size ", h("small", {}, "with the sizes from which another algorithm is the fastest")), times.element, costs));
  element.append(h("div", { class: "answers" }, refused, body));
  const watcher = new ResizeObserver(() => { if (answer) { drawn = null; frame(); } });
  watcher.observe(network);
  ask({ ...state });
  return { unmount() { player.pause(); watcher.disconnect(); } };
}

/** Return a place for each end of a link. */
function places(answer, width, height) {
  const found = new Map(), n = answer.ranks, torus = /^torus ([0-9x ]+)$/.exec(answer.topology);
  const names = [...new Set(answer.edges.flatMap(([from, to]) => [from, to]))];
  if (torus) {
    const shape = torus[1].split(" x ").map(Number), [deep, rows, columns] = shape.length === 3 ? shape : [1, ...shape];
    const wide = columns + (deep - 1) * (columns > 2 ? 0.35 : 0.45), tall = rows + (deep - 1) * 0.45;
    for (let rank = 0; rank < n; rank++) {
      const column = rank % columns, row = Math.floor(rank / columns) % rows, layer = Math.floor(rank / (columns * rows));
      found.set(`rank ${rank}`, { x: ((column + 0.5 + layer * 0.35) * width) / wide, y: ((row + 0.5 + layer * 0.45) * height) / tall });
    }
    return found;
  }
  const upper = names.filter((name) => !name.startsWith("rank "));
  if (!upper.length) {
    for (let rank = 0; rank < n; rank++) {
      const angle = (2 * Math.PI * rank) / n - Math.PI / 2;
      found.set(`rank ${rank}`, { x: width / 2 + (width / 2 - 30) * Math.cos(angle) * Math.min(1, height / width + 0.25), y: height / 2 + (height / 2 - 26) * Math.sin(angle) });
    }
    return found;
  }
  for (let rank = 0; rank < n; rank++) found.set(`rank ${rank}`, { x: ((rank + 0.5) * width) / n, y: height - 24 });
  const levels = [upper.filter((name) => /^(node|leaf) \d+$/.test(name)), upper.filter((name) => name.includes("nic")), upper.filter((name) => name === "network" || name === "spine")].filter((level) => level.length);
  levels.forEach((level, i) => level.forEach((name, k) => found.set(name, { x: ((k + 0.5) * width) / level.length, y: height - 24 - ((i + 1) * (height - 60)) / levels.length })));
  return found;
}

function shorten(words) {
  return words.length < 150 ? words : `${words.slice(0, 110)} … ${words.slice(words.lastIndexOf(":"))}`;
}

/** The least distance between two ranks. */
function gap(place) {
  const all = [...place.values()];
  let least = Infinity;
  for (let i = 0; i < all.length; i++) for (let k = 0; k < i; k++) least = Math.min(least, Math.hypot(all[i].x - all[k].x, all[i].y - all[k].y));
  return least;
}

/** The point at a part of the way along a path of points. */
function along(path, part) {
  const whole = part * (path.length - 1), i = Math.min(path.length - 2, Math.floor(whole)), rest = whole - i;
  return [path[i].x + rest * (path[i + 1].x - path[i].x), path[i].y + rest * (path[i + 1].y - path[i].y)];
}

function interpolate(xs, ys, x) {
  const i = Math.max(1, xs.findIndex((each) => each >= x)), part = (Math.log(x) - Math.log(xs[i - 1])) / (Math.log(xs[i]) - Math.log(xs[i - 1]));
  return Math.exp(Math.log(ys[i - 1]) + part * (Math.log(ys[i]) - Math.log(ys[i - 1])));
}

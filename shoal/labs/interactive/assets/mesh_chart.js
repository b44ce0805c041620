// The mesh of a layout on its nodes: every accelerator a cell, coloured by pipeline rank; the groups of one of them.
import { COLOURS, canvas, colour, h, redraw, show } from "lab/kit";

const AXES = { tp: "tensor parallel", cp: "context parallel", ep: "expert parallel", dp: "data parallel", pp: "pipeline" };
const GAP = 3, MOST_CELL = 15;

export function meshChart() {
  let answer, painted, chosen = 0, axis = null;
  const table = h("div", { class: "scroll" }), said = h("p", { class: "note", "aria-live": "polite" });
  const drawn = canvas(draw, { height: (wide) => (answer ? arrange(wide).tall : 60), label: "Accelerators of the cluster. Arrow keys choose one." });
  drawn.canvas.tabIndex = 0;
  drawn.canvas.addEventListener("keydown", (event) => {
    const each = answer?.cluster.per_node;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: each, ArrowUp: -each, Home: -Infinity, End: Infinity }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(answer.cluster.devices - 1, chosen + step)));
  });
  drawn.canvas.addEventListener("pointermove", (event) => point(event));
  drawn.canvas.addEventListener("click", (event) => point(event));
  const element = h("div", {}, drawn.element, said, table);

  // Nodes in rows, each a block of its accelerators; the largest cells that need at most 260 pixels of height.
  function arrange(wide) {
    const { nodes, per_node: each } = answer.cluster;
    const columns = nodes === 1 ? Math.ceil(Math.sqrt(each * 4)) : each > 8 ? 8 : Math.min(each, 4);
    const rows = Math.ceil(each / columns);
    for (let cell = MOST_CELL; ; cell--) {
      const gap = cell > 6 ? GAP : 2, across = columns * cell + gap * 2, down = rows * cell + gap * 2;
      const many = Math.max(1, Math.floor(wide / across)), lines = Math.ceil(nodes / many);
      if (lines * down <= 260 || cell <= 2) return { cell, gap, across, down, many, columns, rows, tall: lines * down + 4 };
    }
  }

  /** The upper left corner of a rank's cell. */
  function place(rank, { cell, gap, across, down, many, columns }) {
    const each = answer.cluster.per_node, node = Math.floor(rank / each), at = rank % each;
    return [(node % many) * across + gap / 2 + (at % columns) * cell,
      Math.floor(node / many) * down + gap / 2 + Math.floor(at / columns) * cell];
  }

  function draw(context, wide) {
    if (!answer) return;
    const arranged = arrange(wide), { cell, gap, across, down, many, columns } = arranged;
    const { devices, per_node: each } = answer.cluster, inset = cell > 4 ? 1 : 0;
    const shades = COLOURS.map(colour), pipeline = axisOf("pp");
    const group = axis ? members(axisOf(axis)) : null;
    const lane = colour("--lane"), ink = colour("--ink");
    if (cell > 4) {
      context.fillStyle = lane;
      for (let node = 0; node * each < devices; node++) {
        context.beginPath();
        context.roundRect((node % many) * across, Math.floor(node / many) * down, across - gap, down - gap, 3);
        context.fill();
      }
    }
    const stageOf = (rank) => (pipeline ? index(rank, pipeline) : 0), faint = (rank) => group !== null && !group.has(rank);
    for (let rank = 0, next; rank < devices; rank = next) { // equal cells without gaps are one rectangle
      const stage = stageOf(rank), pale = faint(rank), rowEnds = Math.min(devices, rank - (rank % each % columns) + columns,
        rank - (rank % each) + each);
      next = rank + 1;
      while (!inset && next < rowEnds && stageOf(next) === stage && faint(next) === pale) next += 1;
      const [x, y] = place(rank, arranged);
      context.fillStyle = shades[stage % shades.length];
      context.globalAlpha = pale ? 0.16 : 1;
      context.fillRect(x, y, (next - rank) * cell - inset, cell - inset);
    }
    context.globalAlpha = 1;
    context.strokeStyle = ink;
    context.lineWidth = 1.5;
    const [x, y] = place(chosen, arranged);
    context.strokeRect(x - 0.5, y - 0.5, cell - inset + 1, cell - inset + 1);
  }

  function point(event) {
    if (!answer) return;
    const arranged = arrange(drawn.canvas.clientWidth), { cell } = arranged;
    let found = 0;
    for (; found < answer.cluster.devices; found++) {
      const [x, y] = place(found, arranged);
      if (event.offsetX >= x && event.offsetX < x + cell && event.offsetY >= y && event.offsetY < y + cell) break;
    }
    if (found < answer.cluster.devices) choose(found);
  }

  function choose(rank) {
    if (rank === chosen) return;
    chosen = rank;
    say();
    drawn.paint();
  }

  function axisOf(name) { return answer.axes.find((each) => each.axis === name); }
  function index(rank, { ranks, stride }) { return Math.floor(rank / stride) % ranks; }
  function members({ ranks, stride }) {
    const first = chosen - index(chosen, { ranks, stride }) * stride;
    return new Set(Array.from({ length: ranks }, (_, i) => first + i * stride));
  }

  function say() {
    const node = Math.floor(chosen / answer.cluster.per_node);
    const where = answer.axes.map((each) => `${each.axis} ${index(chosen, each)}`).join(", ");
    said.textContent = `Rank ${show.count(chosen)}${where && ` (${where})`} on node ${node}`
      + `${axis ? `; its ${axis} group is drawn in full` : ""}.`;
  }

  function set(to) {
    answer = to;
    if (chosen >= to.cluster.devices) chosen = 0;
    if (axis && !axisOf(axis)) axis = null;
    redraw(table, h("table", { class: "mesh" },
      h("thead", {}, h("tr", {}, ["axis", "ranks", "link", "sent a step", "collectives"].map((name) =>
        h("th", { scope: "col", class: name === "collectives" ? "words" : "" }, name)))),
      h("tbody", {}, to.axes.map((each) => {
        const total = each.kinds.reduce((sum, [, size]) => sum + size, 0);
        const toggle = h("button", {
          type: "button", class: "small", "aria-pressed": axis === each.axis,
          onclick: () => { axis = axis === each.axis ? null : each.axis; set(answer); },
        }, `${each.axis} · ${AXES[each.axis]}`);
        return h("tr", {}, h("td", {}, toggle), h("td", {}, show.count(each.ranks)),
          h("td", {}, each.link, h("br"), h("small", {}, each.nodes > 1 ? `over ${show.count(each.nodes)} nodes` : "inside a node")),
          h("td", {}, show.bytes(total), h("br"), h("small", {}, "by rank 0")),
          h("td", { class: "words" }, each.kinds.filter(([, size]) => size > 1e-4 * total)
            .map(([kind, size]) => `${kind} ${show.bytes(size)}`).join(", ")));
      }))));
    say();
    const now = JSON.stringify([to.cluster, to.axes.map(({ axis: name, ranks, stride }) => [name, ranks, stride]), axis]);
    if (now !== painted) drawn.paint(); // 16,384 cells take as long as all the rest
    painted = now;
  }
  return { element, set };
}

// Training panel: a small run on real processes of this machine, watched, disturbed and verified.
import { button, copyable, h, latest, legend, redraw, refusal, s, show, slider, tile } from "lab/kit";
import { number, plot, range, table } from "lab/drawing";

export const title = "Training";

export const defaults = { dp: 2, zero: 1, tp: 1, pp: 1, steps: 200, bucket_mb: 0.1 };

const EVERY = 500; // milliseconds between two looks at the run
const OPS = { F: ["forward", "--blue"], B: ["backward", "--orange"], I: ["backward, input half", "--red"], W: ["backward, weight half", "--yellow"], R: ["wait for reductions", "--violet"], S: ["optimizer", "--grey"], G: ["gather parameters", "--plum"] };
const REDUCTION = "--teal";
const STATUS = { none: "no run", running: "running", finished: "finished", failed: "failed" };

export async function mount(element, state, api, onState) {
  let seen = { status: "none" }, profile = null, timer = 0, gone = false;

  // ---- controls ----

  function change(changed) {
    Object.assign(state, changed);
    onState(state);
    write();
  }
  const slide = (key, label, values, more = {}) => slider({ label, values, value: state[key], onInput: (value) => change({ [key]: value }), ...more });
  const sliders = [
    slide("dp", "dp · data parallel", [1, 2, 3, 4]), slide("zero", "ZeRO stage", [0, 1, 2, 3]), slide("tp", "tp · tensor parallel", [1, 2, 4]),
    slide("pp", "pp · pipeline parallel", [1, 2, 4]), slide("steps", "Steps", range(20, 1000, 20)),
    slide("bucket_mb", "Least bucket", [0.02, 0.05, 0.1, 0.2, 0.5, 1, 25], { unit: "MiB" }),
  ];
  const start = button("Start", () => call("training-start", { ...state }), { class: "main" });
  const stop = button("Stop", () => call("training-stop", {}));
  const ranks = h("p", { class: "note" });
  function write() {
    ranks.textContent = `${state.dp * state.tp * state.pp} ranks, one process each; 2 to 4 are possible.`;
    const running = seen.status === "running";
    start.disabled = running || api.saved;
    stop.disabled = !running || api.saved;
  }
  element.append(h("div", { class: "controls" },
    h("fieldset", {}, h("legend", {}, "Layout"), sliders.map((each) => each.element), ranks),
    h("div", { class: "row" }, start, stop),
    h("p", { class: "note" }, "A model of 4 layers learns the bytes of Python's library. A run ends with the server, and its folder is deleted then.")));

  // ---- answers ----

  const refused = h("div", {}), tiles = h("div", { class: "tiles" }), where = h("div", {}), processes = h("div", { class: "row ranks" });
  const losses = plot(describeLosses, "Loss after each step"), events = h("div", { class: "scroll events" }), verdict = h("div", { "aria-live": "polite" });
  const step = plot(describeStep, "One recorded step on every rank: actions, and the reductions of buckets"), stepWords = h("small", {}), stepKey = h("div", {}), buckets = h("div", {});
  const verify = button("Verify", () => call("training-verify", {}));
  const recorded = h("section", {}, h("h2", {}, "A recorded step ", stepWords), step.element, stepKey, buckets);
  element.append(h("div", { class: "answers" }, refused, tiles,
    h("section", {}, h("h2", {}, "Loss ", h("small", {}, "of the training batch")), losses.element, where),
    h("section", {}, h("h2", {}, "Processes ", h("small", {}, "kill one, and watch the run recover")), processes, events),
    recorded,
    h("section", {}, h("h2", {}, "Verification ", h("small", {}, "shoal verify: two steps of this layout in float64 beside one device")), h("div", { class: "row" }, verify), verdict)));

  async function call(name, request) {
    refused.replaceChildren();
    try {
      if (name === "training-start") { start.disabled = true; profile = null; }
      await api(name, request);
    } catch (error) {
      refused.replaceChildren(refusal(error));
    }
    look();
  }

  const send = latest(api, "training-look", take, (error) => refused.replaceChildren(refusal(error)));
  async function look() {
    clearTimeout(timer);
    await send({});
    if (!gone && (seen.status === "running" || seen.verification?.status === "running")) timer = setTimeout(look, EVERY);
  }
  const sendProfile = latest(api, "training-profile", (answer) => {
    profile = answer;
    draw();
  }, () => {}); // no step is recorded yet: the next look asks again

  function take(answer) {
    if (seen.folder !== answer.folder) profile = null;
    seen = answer;
    write();
    draw();
    if (answer.profiled && !profile) sendProfile({});
  }

  function draw() {
    const steps = seen.steps ?? [], last = steps.at(-1);
    const stopped = seen.status === "finished" && last?.[0] < seen.request.steps;
    tiles.replaceChildren(
      tile("Run", stopped ? "stopped" : STATUS[seen.status], seen.layout ?? "start one"),
      tile("Step", last ? `${last[0]} of ${seen.request.steps}` : "–"), tile("Loss", last ? number(last[1], 4) : "–", "nats per token"),
      tile("Speed", last ? `${show.short(last[2])} tokens/s` : "–"));
    redraw(where, ...(seen.folder ? [h("p", { class: "note" }, "The run's folder, and its command:"), copyable(`${seen.folder}\n${seen.command}`, "folder and command")] : []),
      ...(seen.status === "failed" ? [h("pre", {}, seen.output)] : []));
    redraw(processes, ...(seen.ranks ?? []).map((pid, rank) => button(`Kill rank ${rank} (process ${pid})`, () => call("training-kill", { rank }), { disabled: api.saved })));
    if (!processes.children.length) processes.append(h("p", { class: "note" }, seen.status === "running" ? "The ranks are starting." : "No rank is running."));
    events.replaceChildren(...(seen.events?.length ? [table(["after", "event", "details"], seen.events.map(({ time, event, ...rest }) => [
      show.seconds(Math.max(0, time)), event, Object.entries(rest).filter(([, value]) => typeof value !== "object").map(([name, value]) => `${name} ${String(value).split("\n")[0]}`).join(", "),
    ]), { words: [1, 2] })] : []));
    losses.draw();
    drawVerdict();
    recorded.hidden = !profile;
    if (profile) drawProfile();
    verify.disabled = seen.status === "none" || seen.verification?.status === "running" || api.saved;
  }

  function drawVerdict() {
    const found = seen.verification;
    if (!found) { verdict.replaceChildren(); return; }
    const words = {
      running: "Both are computing …", differs: "The layout computes something else than one device.", failed: "The verification failed.",
      same: `The layout computes what one device computes: the largest relative error of a gradient is ${(found.worst_gradient ?? 0).toExponential(1)}.`,
    }[found.status];
    verdict.replaceChildren(h("p", { class: { same: "result good", running: "note" }[found.status] ?? "result bad" }, words),
      ...(found.output ? [h("pre", {}, found.output)] : []), ...(found.findings ?? []).slice(0, 5).map((each) => h("p", { class: "note" }, JSON.stringify(each))));
  }

  function describeLosses() {
    const points = (seen.steps ?? []).map(([at, loss]) => [at, loss]);
    if (!points.length) return null;
    const values = points.map(([, loss]) => loss), low = Math.min(...values), high = Math.max(...values);
    return {
      height: 240, x: { low: 0, high: seen.request.steps, label: "step" }, y: { low: low - 0.05 * (high - low || 1), high: high + 0.05 * (high - low || 1), label: "loss [nats per token]" },
      series: [{ colour: "var(--blue)", points }],
      marks: (seen.events ?? []).filter((event) => event.event === "recovered" && event.step !== undefined).map((event) => ({ x: event.step, y: points.find(([at]) => at >= event.step)?.[1] ?? low, words: "recovered" })),
    };
  }

  // ---- the recorded step ----

  function drawProfile() {
    stepWords.textContent = `step ${profile.step}, ${show.seconds(profile.seconds)}; the lower bar of a rank is a bucket from the start of its reduction until the rank has the result`;
    const used = new Set(profile.ranks.flatMap((rank) => rank.actions.map(([, op]) => op)));
    stepKey.replaceChildren(legend([...Object.entries(OPS).filter(([op]) => used.has(op)).map(([, [name, colour]]) => ({ name, colour: `var(${colour})` })), { name: "reduction of a bucket, by its number", colour: `var(${REDUCTION})` }]));
    const stages = [...new Map(profile.ranks.map((rank) => [`${rank.place.pp} ${rank.place.tp}`, rank])).values()];
    const rows = stages.flatMap((rank) => rank.buckets.map((bucket, i) => [
      String(i), bucket.names.length > 3 ? `${bucket.names.slice(0, 2).join(", ")} and ${bucket.names.length - 2} more` : bucket.names.join(", "), show.bytes(bucket.bytes), `pp ${rank.place.pp}, tp ${rank.place.tp}`,
      profile.ranks.map((other, r) => [other, r]).filter(([other]) => other.place.pp === rank.place.pp && other.place.tp === rank.place.tp)
        .map(([other, r]) => (bucket.shards === 1 ? `rank ${r}: all` : `rank ${r}: part ${other.buckets[i].shard + 1} of ${bucket.shards}`)).join("; "),
    ]));
    buckets.replaceChildren(table(["bucket", "parameters", "gradients", "place", "who updates it"], rows, { words: [1, 4] }));
    step.draw();
  }

  function describeStep() {
    if (!profile) return null;
    const high = 46, count = profile.ranks.length;
    return {
      height: count * high + 66, left: 54, x: { low: 0, high: profile.seconds, label: "time in the step", show: show.seconds }, y: { low: 0, high: count, label: "", show: () => "" },
      under(group, X, Y) {
        profile.ranks.forEach((rank, r) => {
          const top = Y(count - r) + 4, rows = high - 12;
          group.append(s("rect", { x: X(0), y: top, width: X(profile.seconds) - X(0), height: rows, class: "lane" }));
          for (const [name, op, from, to] of rank.actions) {
            if (!(op in OPS) || to <= from) continue;
            group.append(s("rect", { x: X(from), y: top, width: Math.max(0.7, X(to) - X(from) - 0.6), height: rows * 0.5, style: { fill: `var(${OPS[op][1]})` } }, s("title", {}, `rank ${r}: ${OPS[op][0]} ${name}, ${show.seconds(to - from)}`)));
          }
          const lanes = Math.max(1, rank.buckets.length), tall = (rows * 0.5 - 1) / lanes;
          for (const [bucket, from, to] of rank.reductions) {
            group.append(s("rect", { x: X(from), y: top + rows * 0.5 + 1 + bucket * tall, width: Math.max(1, X(to) - X(from)), height: Math.max(1, tall - 0.6), style: { fill: `var(${REDUCTION})` } }, s("title", {}, `rank ${r}: bucket ${bucket}, ${show.bytes(rank.buckets[bucket].bytes)}, ${show.seconds(to - from)}`)));
          }
        });
      },
      labels: profile.ranks.map((rank, r) => [count - r - 0.4, `rank ${r}`]),
    };
  }

  write();
  draw();
  await look();
  return { unmount() { gone = true; clearTimeout(timer); } };
}

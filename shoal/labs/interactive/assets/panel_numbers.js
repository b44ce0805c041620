// Numbers panel: one number in every format, bit by bit, and gradients against the range of a format.
import { choice, h, latest, refusal, show, slider, text, tile } from "lab/kit";
import { number, plot, range, table } from "lab/drawing";

export const title = "Numbers";

export const defaults = { value: "0.1", format: "fp16", of: "activations", exponent: 0 };

const FORMATS = ["fp32", "bf16", "fp16", "fp8 e4m3", "fp8 e5m2"];
const KINDS = { sign: "--plum", exponent: "--blue", fraction: "--teal" };
const power = (exponent) => `2${String(exponent).replace(/./g, (digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit] ?? "⁻")}`;

export async function mount(element, state, api, onState) {
  let answer = null;

  function change(changed, ask) {
    Object.assign(state, changed);
    onState(state);
    ask();
  }
  let typing;
  const typed = text({
    label: "Number", value: state.value, placeholder: "0.1",
    onInput(value) {
      clearTimeout(typing);
      typing = setTimeout(() => change({ value }, askNumber), 150);
    },
  });
  const examples = choice({
    label: "Examples", value: "", options: [{ name: "", text: "choose one" }, { name: "0.1", text: "0.1: exact in none" }, { name: "65520", text: "65520: too large for fp16" }, { name: "448", text: "448: the largest of e4m3" }, { name: "6e-8", text: "6e-8: fp16's smallest" }, { name: "16777217", text: "2²⁴ + 1: not in fp32" }, { name: "257", text: "257: not in bf16" }],
    onInput(value) { typed.set(value); change({ value }, askNumber); },
  });
  const scale = slider({ label: "Scale of the loss", values: range(-8, 32), value: state.exponent, format: (exponent) => `${power(exponent)} = ${number(2 ** exponent, 6)}`, onInput: (exponent) => change({ exponent }, askGradients) });
  element.append(h("div", { class: "controls" },
    h("fieldset", {}, h("legend", {}, "One number"), examples.element, typed.element),
    h("fieldset", {}, h("legend", {}, "Gradients"),
      choice({ label: "Format", options: FORMATS, value: state.format, onInput: (format) => change({ format }, askGradients) }).element,
      choice({ label: "Gradients of", options: ["activations", "weights"], value: state.of, onInput: (of) => change({ of }, askGradients) }).element,
      scale.element,
      h("p", { class: "note" }, "Multiplying the loss by a scale multiplies every gradient by it; the optimizer divides it out again."))));

  // ---- one number ----

  const bits = h("div", { class: "scroll" }), refusedNumber = h("div", {});
  const key = h("p", { class: "note bits" }, Object.entries(KINDS).flatMap(([name, colour]) => [h("i", { style: { background: `var(${colour})` } }), ` ${name} `]));
  const sendNumber = latest(api, "numbers", (given) => {
    refusedNumber.replaceChildren();
    bits.hidden = false;
    bits.replaceChildren(table(["format", "nearest value", "error", "relative error", "step to the next", "largest", "bits"], given.formats.map((one) => [
      one.name, one.infinite ? "infinity" : `${one.nearest}${one.saturated ? " (its largest)" : ""}`, one.error || "–", one.relative || "–", one.infinite ? "–" : number(one.step), number(one.largest, 5), drawBits(one),
    ]), { words: [6] }));
  }, (error) => { bits.hidden = true; refusedNumber.replaceChildren(refusal(error)); });
  const askNumber = () => sendNumber({ value: state.value });

  function drawBits(one) {
    const part = (name, digits) => [...digits].map((digit) => h("i", { class: digit === "1" ? "on" : undefined, style: { "--own": `var(${KINDS[name]})` } }, digit));
    const [sign, exponent, fraction] = one.bits;
    return h("span", { class: "bits", role: "img", "aria-label": `sign ${sign || "none"}, exponent ${exponent || "none"}, fraction ${fraction}` },
      part("sign", sign), part("exponent", exponent), part("fraction", fraction), one.subnormal && h("small", {}, " subnormal"));
  }

  // ---- gradients ----

  const histogram = plot(describe, "Gradients by size, against the range of the format"), tiles = h("div", { class: "tiles" }), refusedGradients = h("div", {});
  const sendGradients = latest(api, "gradients", (given) => {
    answer = given;
    refusedGradients.replaceChildren();
    const { shares } = answer;
    tiles.replaceChildren(
      tile("Lost: stored as 0", show.percent(shares.zero), undefined, { class: shares.zero > 0.001 ? "tile bad" : "tile" }),
      tile("Subnormal", show.percent(shares.subnormal), "fewer digits"), tile("Normal", show.percent(shares.normal)),
      tile("Too large", show.percent(shares["too large"]), "infinite, or the largest", { class: shares["too large"] ? "tile bad" : "tile" }));
    histogram.draw();
  }, (error) => refusedGradients.replaceChildren(refusal(error)));
  const askGradients = () => sendGradients({ format: state.format, of: state.of, exponent: state.exponent });

  function describe() {
    if (!answer) return null;
    const most = Math.max(...answer.counts) / answer.total, shift = state.exponent;
    const low = -64, high = 40, soft = (name) => `color-mix(in srgb, var(${name}) 16%, transparent)`;
    const from = (i) => answer.first + i + shift;
    return {
      height: 300, x: { low, high, label: "size of a scaled gradient", show: power }, y: { low: 0, high: most * 1.15 || 1, label: "share of the gradients", show: show.percent },
      bands: [
        { from: low, to: answer.tiniest, colour: soft("--red"), words: "stored as 0" }, { from: answer.tiniest, to: answer.smallest, colour: soft("--yellow"), words: "subnormal" },
        { from: answer.smallest, to: answer.largest, colour: soft("--teal"), words: "normal" }, { from: answer.largest, to: high, colour: soft("--red"), words: "too large" },
      ],
      bars: answer.counts.map((count, i) => ({ from: from(i), to: from(i) + 1, y: count / answer.total, colour: "var(--blue)", words: `${power(from(i))} to ${power(from(i) + 1)}: ${show.percent(count / answer.total)}` })),
    };
  }

  element.append(h("div", { class: "answers" },
    h("section", {}, h("h2", {}, "One number ", h("small", {}, "the nearest value of each format; ties go to the even one")), refusedNumber, bits, key),
    h("section", {}, h("h2", {}, "Loss scaling ", h("small", {}, "gradients of the catalog's tiny model for one batch, before training")), refusedGradients, tiles, histogram.element)));
  askNumber();
  askGradients();
  return { unmount: () => clearTimeout(typing) };
}

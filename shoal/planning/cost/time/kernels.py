"""Times of one layer's parts on one rank: products, attention, elementwise operations, collectives, launches.

Closed forms over many runs together (`Runs`), with the constants of a calibration. Pipelines and data parallelism are
not modelled here.
"""

from __future__ import annotations

from functools import cached_property
from math import inf

import numpy as np

from shoal.planning.cost.batched_runs import E, Runs
from shoal.planning.cost.time.communication import CommunicationGroup
from shoal.spec.catalog.calibration import NETWORKS, Calibration

LAYER_KERNELS = 45  # of a dense layer's forward: those that the constant `launch` launches
QUANTISED_KERNELS = 3  # for each product in 16 bits: its input is converted with two more
PASSES_BIASED = 23, 6
"""More passes forward over the width of experts and over the hidden state where biases are added expert by expert and
joined, and their activation is not fused: counted in Megatron-Core's ``TEGroupedMLP`` (``transformer/moe/experts.py``),
with a limited gate as in gpt-oss."""
FLASH = 2  # from this index of `ATTENTION` on, scores never reach memory


def soft_max(a: np.ndarray, b: np.ndarray, sharp: float) -> np.ndarray:
    """Return a smooth maximum of two times that mostly overlap: (a^p + b^p)^(1/p)."""
    larger = np.maximum(np.maximum(a, b), 1e-12)
    return larger * ((a / larger) ** sharp + (b / larger) ** sharp) ** (1 / sharp)


class Kernels:
    """Step parts of a layer, a head and a group of ranks, for each of many runs."""

    def __init__(self, runs: Runs, calibration: Calibration):
        self.runs, self.calibration, self.constants = runs, calibration, calibration.numbers

    def constant(self, name: str) -> np.ndarray:
        """Return a constant's value for each run, or its single value."""
        by, value = self.calibration.constants[name].by, self.calibration[name]
        return value[self.runs.code(by)] if by else value

    # ---- rates ---------------------------------------------------------------------------------------------------

    @cached_property
    def hbm(self) -> np.ndarray:
        """Attained memory bandwidth in bytes/s."""
        return self.runs.hbm * self.constant("hbm")

    @cached_property
    def rate(self) -> np.ndarray:
        """FLOP/s that a large product attains in 16 bits, at most the rate of the best-shaped product."""
        return self.runs.peak * np.minimum(self.constant("product"), self.runs.attainable)

    @cached_property
    def layer_rate(self) -> np.ndarray:
        """Attained FLOP/s of a layer's products, in 8 or 4 bits if these are."""
        r = self.runs
        return np.where(r.quantised > 0, r.quantised_peak * self.constant("product_fp8"), self.rate)

    @cached_property
    def outside(self) -> np.ndarray:
        """Attained bytes/s of an accelerator's own share of the adapters, between two nodes."""
        return self.runs.nic * self.constant("outside")

    def group(self, ranks: np.ndarray, stride: np.ndarray | float) -> CommunicationGroup[np.ndarray]:
        """Return groups of ranks, ``stride`` apart, among equal groups of the ranks between them."""
        r, c = self.runs, self.constants
        local = np.clip(r.per_node // np.maximum(stride, 1), 1, ranks)
        nodes = np.ceil(ranks / local)
        # A ring on each axis of a torus that the ranks fill, of axes of equal sizes.
        axes = np.clip(np.log(np.maximum(ranks, 2)) * r.axes / np.log(np.maximum(r.per_node, 2)), 1, r.axes)
        inside = axes * r.inside * self.constant("inside")
        out = local * self.outside * (nodes / 2) ** -self.constant("thin")
        out = np.minimum(out, np.where(local > 1, inside, inf))
        near = np.where(r.through_memory > 0, np.ceil(np.log2(local)), axes * (local ** (1 / axes) - 1))
        hop, far_hop = self.constant("latency_inside"), self.constant("latency_outside")
        steps = near * hop + (nodes - 1) * far_hop
        meeting = c["collective_launch"] + c["wait"] * np.log2(np.maximum(ranks, 1))
        latency = np.where(ranks > 1, meeting + steps, 0.0)
        bandwidth = np.where(nodes > 1, out, inside)
        slowest = np.maximum((local - 1) / inside, (ranks - local) / self.outside)
        exchange = np.where(slowest > 0, (ranks - 1) / np.where(slowest > 0, slowest, 1.0), inf)
        summing = latency + np.where(r.through_memory > 0, latency, steps)  # one kernel, of twice the steps
        gathering = np.where(r.through_memory > 0, summing, latency)
        return CommunicationGroup(ranks, bandwidth, exchange, bandwidth, gathering, summing, latency, latency)

    # ---- one layer -----------------------------------------------------------------------------------------------

    @cached_property
    def widths(self) -> tuple[np.ndarray, np.ndarray]:
        """Width of the queries on one rank, and the mean width of the keys and of the values."""
        r = self.runs
        return r.heads * r.head_dim / r.tp, r.kv_heads * (r.head_dim + r.values) / 2 / np.minimum(r.tp, r.kv_heads)

    def product(self, m: np.ndarray, k: np.ndarray, n: np.ndarray, rate: np.ndarray) -> np.ndarray:
        """Return the seconds of [m, k] x [k, n]: by FLOPs, with a penalty for small sides, or by bytes."""
        short_m, short_k = self.constant("short_m"), self.constant("short_k")
        shape = 1 + short_m / m + short_k * (1 / k + 1 / n)
        return soft_max(2 * m * k * n / rate * shape, E * (m * k + k * n + m * n) / self.hbm, 4.0)

    @cached_property
    def products(self) -> np.ndarray:
        """Seconds of a layer's matrix products in a forward; a backward has two for each."""
        r, n, hidden = self.runs, self.runs.tokens, self.runs.hidden / self.runs.tp_x
        attention = self.heads_product + self.product(n, r.heads * r.values / r.tp_y, hidden, self.layer_rate)
        block = self.product(n, hidden, (1 + r.gated) * r.ffn / r.tp_y, self.layer_rate) + self.last_product
        return attention + r.alone * block + self.experts_products

    @cached_property
    def heads_product(self) -> np.ndarray:
        """Seconds of the products that make queries, keys and values, in a forward."""
        r, (q, kv) = self.runs, self.widths
        made = self.product(r.tokens, r.hidden / r.tp_x, (q + 2 * kv) * r.tp_x, self.layer_rate)
        return np.where(r.rotary_dim > 0, self.from_latents, made)

    @cached_property
    def last_product(self) -> np.ndarray:
        """Seconds of the last product of a dense layer in a forward."""
        r = self.runs
        return self.product(r.tokens, r.ffn / r.tp_y, r.hidden / r.tp_x, self.layer_rate)

    @cached_property
    def rows(self) -> np.ndarray:
        """Rows of tokens that a rank sends to experts in a layer with a router: each token goes to several."""
        return self.runs.tokens / self.runs.tp * self.runs.per_token

    @cached_property
    def experts_products(self) -> np.ndarray:
        """Seconds of the products of a rank's experts in a forward, each with an equal part of the rows."""
        r, rate, each = self.runs, self.layer_rate, self.runs.experts / self.runs.ep
        rows, width = np.maximum(self.rows * r.etp / each, 1), r.ffn / r.etp
        one = self.product(rows, r.hidden, (1 + r.gated) * width, rate) + self.product(rows, width, r.hidden, rate)
        return r.routed * each * one

    @cached_property
    def from_latents(self) -> np.ndarray:
        """Seconds of the products of latent attention before its core, in a forward."""
        down = self.product(self.tokens_between, self.runs.hidden, np.maximum(self.runs.latents, 1), self.layer_rate)
        return down + self.expansion

    @cached_property
    def expansion(self) -> np.ndarray:
        """Seconds of the products that make heads of latents, in a forward."""
        r, n, rate, heads = self.runs, self.runs.tokens, self.layer_rate, self.runs.heads / self.runs.tp
        into = np.where(r.query_rank > 0, r.query_rank, r.hidden)  # of queries
        expanded = heads * (r.head_dim - r.rotary_dim + r.values)
        return self.product(n, into, heads * r.head_dim, rate) + self.product(
            n, np.maximum(r.kv_rank, 1), expanded, rate
        )

    @cached_property
    def scores_in_memory(self) -> np.ndarray:
        """True if the kernel writes scores to memory; flash kernels do not."""
        return self.runs.attention < FLASH

    @cached_property
    def plain_softmax(self) -> np.ndarray:
        """True if softmax, mask and dropout are separate kernels; Megatron fuses them for multiples of four."""
        r = self.runs
        return (r.attention == 0) | ((r.attention == 1) & (r.b * r.heads / r.tp % 4 != 0))

    @cached_property
    def attention(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a layer's attention core, forward and backward."""
        r, c, (q, _) = self.runs, self.constants, self.widths
        values = np.where(r.pads_values > 0, r.head_dim, r.values) * r.heads / r.tp
        flops = 2 * r.tokens * r.s * (q + values) * np.where(self.scores_in_memory, 1.0, 0.5 * r.seen)
        kernels = [self.constant(name) for name in ("flash_1", "flash_2", "flash_3")]
        part = np.choose(np.clip(r.code("attention") - FLASH, 0, 2), kernels)
        part = part * r.head_dim / (r.head_dim + c["narrow_head"]) * r.s / (r.s + c["short_sequence"])
        core = flops / (r.peak * np.where(self.scores_in_memory, self.constant("batched_product"), part))
        core = core * np.where(self.scores_in_memory & (r.head_dim % 8 != 0), c["odd_head"], 1.0)
        sixteen = self.scores_in_memory & (r.b * r.heads / r.tp == 16)
        core = core * np.where(sixteen, c["batch_of_16"], 1.0)
        scores = E * r.b / r.cp * r.heads / r.tp * r.s**2
        passes = np.where(self.plain_softmax, c["plain_softmax"], c["fused_softmax"])
        moved = np.where(self.scores_in_memory, passes * scores / self.hbm, 0.0)
        return core + moved, np.where(self.scores_in_memory, 2.0, 2.5) * core + 2 * moved

    @cached_property
    def tokens_between(self) -> np.ndarray:
        """Tokens between the tensor-parallel regions of a layer."""
        r = self.runs
        return np.where(r.sequence_parallel > 0, r.tokens / r.tp_y, r.tokens)

    @cached_property
    def elements(self) -> np.ndarray:
        """Seconds of a layer's elementwise operations in a forward: bytes over attained memory bandwidth."""
        r, c, (q, kv) = self.runs, self.constants, self.widths
        norms = self.constant("passes_hidden") + c["passes_norm"] * (1 - r.fused_norm)
        wide = self.constant("passes_ffn") * (1 + r.gated) * r.ffn * r.active / r.tp
        copied = np.where(r.rotary_dim > 0, 2.0, 1.0)  # heads of latents are copied together
        heads = copied * c["passes_heads"] * (q + 2 * kv)
        inner = self.tokens_between * (r.hidden / r.tp_x + r.latents) * norms + r.tokens * (wide + heads)
        moved = c["passes_rows"] * self.rows * r.hidden
        apart = r.expert_biases * (r.expert_kernels > 0)  # no kernel adds them to the products of all experts
        biased = apart * self.rows * (PASSES_BIASED[0] * r.ffn + PASSES_BIASED[1] * r.hidden)
        return E * (inner + r.routed * (moved + biased)) / self.hbm

    @cached_property
    def gather(self) -> np.ndarray:
        """Seconds of one gather of a block's input along y, with sequence parallelism."""
        r = self.runs
        return self.group(r.tp_y, r.tp_x).all_gather(E * r.tokens * r.hidden / r.tp_x)

    @cached_property
    def exchange(self) -> np.ndarray:
        """Seconds of one tensor-parallel sum of a block's output, or of its gather and scatter.

        On a grid it is along y, with half of what a layer's forward scatters and gathers along x.
        """
        r, (q, kv) = self.runs, self.widths
        size = E * r.tokens * r.hidden / r.tp_x
        along_y = np.where(r.sequence_parallel > 0, 2 * self.gather, self.group(r.tp_y, r.tp_x).all_reduce(size))
        inside = 2 * q + 2 * kv + (2 + r.gated) * r.ffn * r.alone / r.tp
        return along_y + self.group(r.tp_x, 1).all_gather(E * r.tokens * inside * r.tp_x, 4) / 2

    @cached_property
    def sums(self) -> np.ndarray:
        """Tensor-parallel sums in a layer's forward. Routed experts have none: their tokens are spread over ranks."""
        return 2 - self.runs.routed * (self.runs.shared == 0) - self.runs.parallel_block

    @cached_property
    def routing(self) -> np.ndarray:
        """Seconds of sending rows to their experts' ranks, or back, evenly between ranks; the mean over layers.

        Ranks that split experts gather the rows of all of them, and sum their results. Where a row is sent once to each
        node and copied there (DeepSeek-AI 2024, DeepSeek-V3, section 3.2.2), it leaves for as many other nodes as hold
        experts of its token: of N nodes and k experts N (1 - (1 - 1/N)^k), limited by the groups that it chooses from.
        Inside a node it is sent once to each rank.
        """
        r, local = self.runs, np.clip(self.runs.per_node // self.runs.etp, 1, self.runs.ep)
        nodes, size = np.ceil(r.ep / local), r.row_bytes * self.rows * r.hidden
        copies, of_nodes, of_ranks = np.maximum(r.per_token, 1), *(
            group * (1 - (1 - 1 / group) ** r.per_token) for group in (nodes, r.ep)
        )
        of_nodes = np.minimum(of_nodes, r.groups_per_token * np.maximum(1, nodes / r.groups))
        far, near = (np.where(r.rows_once > 0, np.minimum(of / copies, 1), 1.0) for of in (of_nodes, of_ranks))
        crossing = (r.ep - 1) * near / (r.inside * self.constant("inside"))
        attained = np.where(r.rows_once > 0, 1.0, self.constants["all_to_all"]) * self.outside
        crossing = np.where(nodes > 1, np.maximum(crossing, (r.ep - local) * far / attained), crossing)
        crossing = size * crossing / r.ep
        latency = self.group(r.ep, r.etp).exchange_latency
        gathering = self.group(r.etp, 1).all_gather(E * self.rows * r.etp * r.hidden)
        return r.routed * (latency + crossing + gathering)

    @cached_property
    def context(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a layer's forward and backward in which ring attention waits for keys and values.

        A block travels while the one before is computed; in backward with its gradients (Liu et al. 2023).
        """
        r, (_, kv) = self.runs, self.widths
        far = r.cp * r.tp > r.per_node
        link = np.where(far, self.outside, r.inside * self.constant("inside"))
        block = self.constants["collective_launch"] + 2 * E * r.tokens * kv / link
        forward, backward = (seconds / r.cp for seconds in self.attention)
        waits = np.maximum(block - forward, 0.0), np.maximum(2 * block - backward, 0.0)
        return (r.cp - 1) * waits[0], (r.cp - 1) * waits[1]

    @cached_property
    def launches(self) -> np.ndarray:
        """Seconds in which the host launches a layer's forward: a lower bound of the forward."""
        r, c = self.runs, self.constants
        exchanges = (r.tp > 1) * (1 + (r.sequence_parallel > 0))  # a gather and a scatter in place of a sum
        more = c["launch_exchange"] * exchanges + c["launch_plain_softmax"] * self.plain_softmax
        # The hosts' cores also carry the messages of all tensor-parallel ranks to other nodes.
        carried = (r.network == NETWORKS.index("tcp")) & (r.ranks > r.per_node) & (r.tp > 1)
        return (r.graphs == 0) * self.constant("launch") * (1 + more + c["launch_crowded"] * r.tp * carried)

    @cached_property
    def meeting(self) -> np.ndarray:
        """Seconds that one exchange adds to the host's: waiting for the slowest host; over tcp, where hosts carry the
        messages, all steps between nodes."""
        r, group = self.runs, self.group(self.runs.tp_y, self.runs.tp_x)
        gathers, by_host = r.sequence_parallel > 0, (r.network == NETWORKS.index("tcp")) & (r.tp > r.per_node)
        slowest = self.constants["wait"] * np.log2(r.tp) * (1 + gathers)
        return np.where(by_host, np.where(gathers, 2 * group.gather_latency, group.sum_latency), slowest)

    @cached_property
    def experts_waits(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a layer's forward and backward in which the accelerator waits for the kernels of experts.

        The host cannot launch them ahead: their rows are known when the router's result has reached it. So the longer
        of launching and computing counts.
        """
        r, kernels = self.runs, self.runs.expert_kernels * np.where(self.runs.quantised > 0, QUANTISED_KERNELS, 1)
        launched = r.routed * r.experts / r.ep * kernels * self.constant("launch") / LAYER_KERNELS
        backward, computing = launched * self.constants["launch_backward"], self.experts_products
        return np.maximum(launched - computing, 0.0), np.maximum(backward - 2 * computing, 0.0)

    @cached_property
    def host(self) -> np.ndarray:
        """Seconds that a layer's forward takes the host: launches, and what exchanges add."""
        return self.launches + self.sums * self.meeting

    @cached_property
    def forward(self) -> np.ndarray:
        """Seconds of a layer's forward on the accelerator."""
        inside = self.products + self.attention[0] + self.elements + self.context[0] + self.experts_waits[0]
        return inside + self.sums * self.exchange + 2 * self.routing

    @cached_property
    def again(self) -> np.ndarray:
        """Seconds of a layer's recomputation, by `RECOMPUTE`.

        "operators" is torchtitan's selective policy (its `activation_checkpoint.py`): every second product, and
        everything except products, attention and reduce-scatters; so, for each exchange, the gather. In "products",
        a compiler's, norms and activations are computed in the kernels that read them.
        """
        r, operators = self.runs, self.products / 2 + self.elements + self.exchange
        norms = 2 * 2 * E * self.tokens_between * r.hidden / self.hbm  # each reads and writes a hidden state
        parts = r.recomputes_heads * np.where(r.rotary_dim > 0, self.expansion, 0.0) + r.recomputes_norms * norms
        activation = (2 + r.gated) * E * r.tokens * r.ffn * r.active / r.tp / self.hbm  # gate, up and their product
        parts = parts + r.recomputes_activation * activation
        unused = r.drops_unused * (1 - r.routed) * (self.last_product + self.exchange)
        unused = unused + r.offloads_heads * self.heads_product
        core = self.attention[0] + parts
        return np.choose(r.code("recompute"), [parts, core, self.forward - unused, operators, core])

    @cached_property
    def backward(self) -> np.ndarray:
        """Seconds of a layer's backward with recomputation on the accelerator."""
        return self.computing_backward + 2 * self.routing - self.hidden_rows

    @cached_property
    def exchanged_backward(self) -> np.ndarray:
        """Exchanges of a backward, relative to its forward's: block inputs may be gathered once more."""
        r = self.runs
        return np.where((r.sequence_parallel > 0) & (r.hides_gathers == 0), 1.5, 1.0)

    @cached_property
    def computing_backward(self) -> np.ndarray:
        """Seconds of a layer's backward with recomputation, without sending rows to experts."""
        r, sums = self.runs, self.exchange * self.sums * self.exchanged_backward
        hidden = np.minimum(sums * self.constants["hide_tensor"], self.products)
        exposed = sums - np.where(r.overlap_tensor > 0, hidden, 0.0)
        computing = 2 * self.products + self.attention[1] + 2 * self.elements + self.experts_waits[1]
        return computing + exposed + self.context[1] + self.again

    @cached_property
    def hidden_rows(self) -> np.ndarray:
        """Seconds in which rows of a layer travel, forward and backward, while another micro-batch is computed."""
        computing = self.forward - 2 * self.routing + self.computing_backward
        hides = self.runs.overlap_rows * self.runs.overlap_experts * (self.runs.ep > 1)
        return np.minimum(hides * 4 * self.routing, computing)

    @cached_property
    def launches_of_both(self) -> np.ndarray:
        """Seconds in which the host launches a forward and a backward with recomputation."""
        again = self.runs.code("recompute") >= 2
        launched = self.launches * (1 + self.constants["launch_backward"] + again)
        return launched + self.sums * self.meeting * (1 + self.exchanged_backward + again)

    @cached_property
    def layer(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a layer's forward and backward, at least the host's launch time."""
        forward = self.longer(self.forward, self.host)
        return forward, self.longer(self.forward + self.backward, self.launches_of_both) - forward

    @cached_property
    def alternates(self) -> np.ndarray:
        """Whether launching and computing take turns: the host waits for each kernel, or computes itself."""
        return (self.runs.blocking > 0) | (self.runs.through_memory > 0)

    def longer(self, computing: np.ndarray, launching: np.ndarray) -> np.ndarray:
        """Return the longer of both times, as the device computes while its host launches; or their sum."""
        return np.where(self.alternates, computing + launching, np.maximum(computing, launching))

    # ---- the ends ------------------------------------------------------------------------------------------------

    @cached_property
    def output(self) -> np.ndarray:
        """Seconds of the product with the output matrix, in a forward."""
        return self.product(self.runs.tokens, self.runs.hidden, self.runs.vocab / self.runs.tp, self.rate)

    @cached_property
    def head(self) -> np.ndarray:
        """Seconds of forward and backward of the output matrix and the loss."""
        n, rows = self.runs.tokens, self.runs.vocab / self.runs.tp
        loss = 4 * self.constant("passes_loss") * n * rows / self.hbm
        odd = np.where(rows % 2 == 1, self.constants["odd_vocabulary"], 1.0)
        return 3 * odd * self.output + loss + self.exchange

    @cached_property
    def further(self) -> np.ndarray | float:
        """Seconds of forward and backward of multi-token prediction: a projection, a layer and the head each."""
        r = self.runs
        if not r.further.any():
            return 0.0
        projection = 3 * self.product(r.tokens, 2 * r.hidden, r.hidden, self.rate)
        return r.further * (self.head + projection + self.forward + self.backward)

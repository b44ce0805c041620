"""Tensor parallelism of any module: a table of how its layers and parameters are split.

A table maps patterns of names (`shoal.engine.parallel.tensor.matches`) to styles. The styles have the names that
transformers uses in its plans, so its models need no table.

    colwise               linear layer split by output; its output stays split
    colwise_gather_output the same, with the output gathered
    colwise_kv:n          linear layer of n heads of keys or values: neighbouring ranks hold one head if tp exceeds n
    rowwise               linear layer split by input, which is split already; its output is summed
    rowwise_split_input   the same, for an input that is not split
    embedding_rowwise     embedding split by id; the rows that are looked up are summed
    replicated_with_grad_allreduce  a module between split layers, whose ranks each see a part: gradients are summed
    moe_tp_experts        a module with split parameters: its output is summed
    sequence_parallel     a layer whose ranks have a part of the tokens, with ``parallel.sequence_parallel``

For a parameter, "colwise" splits the last dim but one, "rowwise" the last, and "packed_colwise" each half of the last
dim but one, such as gates joined with their linear part.

Layers of transformers named "k_proj" and "v_proj" that are "colwise" have the heads that their attention says.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

"""Names of options in other trainers (Megatron-LM, torchtitan, transformers, nanoGPT), for errors."""

USUAL_NAMES = {
    # parallelism
    "tp": "tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size",
    "pp": "pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size",
    "cp": "context_parallel context_parallel_size context_parallel_degree",
    "ep": "expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size expert_tensor_parallel_degree",
    "dp": "data_parallel data_parallel_size data_parallel_degree data_parallel_shard_degree "
          "data_parallel_replicate_degree",
    "virtual_stages": "vpp virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage "
                      "num_virtual_stages_per_pipeline_rank pipeline_parallel_layers_per_stage",
    "parallel.schedule": "pipeline_schedule pipeline_parallel_schedule",
    "zero": "zero_stage fsdp fsdp2 distributed_optimizer use_distributed_optimizer use_fsdp "
            "data_parallel_sharding_strategy",
    "recompute": "recompute_granularity recompute_activations activation_checkpoint activation_checkpointing "
                 "gradient_checkpointing",
    "micro_batch": "micro_batch_size local_batch_size pipeline_parallel_microbatch_size per_device_train_batch_size",
    "microbatches": "micro_batches num_microbatches num_micro_batches",
    "parallel.overlap": "overlap_grad_reduce",
    "reshard_after_forward": "fsdp_reshard_after_forward",
    # model
    "model.name": "flavor model_name",
    "layers": "num_layers num_hidden_layers n_layer n_layers",
    "hidden": "hidden_size n_embd dim d_model embedding_dim",
    "heads": "num_attention_heads n_head n_heads num_heads",
    "kv_heads": "num_query_groups num_key_value_heads n_kv_heads",
    "head_dim": "kv_channels",
    "ffn": "ffn_hidden_size intermediate_size ffn_dim n_inner",
    "vocab": "vocab_size padded_vocab_size",
    "max_sequence": "max_position_embeddings n_positions",
    "experts": "num_experts num_local_experts moe_num_experts moe_router_topk num_experts_per_tok",
    "count": "num_experts num_local_experts moe_num_experts",
    "per_token": "top_k topk moe_router_topk num_experts_per_tok",
    "shared": "num_shared_experts n_shared_experts",
    "tied": "tie_word_embeddings",
    "norm_eps": "norm_epsilon layernorm_epsilon rms_norm_eps",
    "rope_theta": "rotary_base",
    # data
    "paths": "files text input inputs data_path dataset_path train_files",
    "sequence_length": "seq_len seq_length max_seq_len max_seq_length block_size context_length",
    "tokenizer": "tokenizer_model tokenizer_path tokenizer_type",
    "dataset": "dataset_name hf_dataset",
    "validation_fraction": "split",
    # training
    "steps": "max_steps num_steps train_iters iterations iters max_iters num_iterations train_steps",
    "global_batch": "batch batch_size global_batch_size train_batch_size",
    "precision": "dtype bf16 fp16 fp32 fp8 mixed_precision mixed_precision_param",
    "validate_every": "eval_interval eval_steps eval_iters",
    "optimizer.name": "optim optimizer",
    "learning_rate": "lr",
    "min_lr_fraction": "min_lr",
    "warmup_steps": "warmup warmup_iters lr_warmup_iters lr_warmup_steps lr_warmup_fraction warmup_ratio",
    "optimizer.schedule": "lr_scheduler lr_scheduler_type lr_decay_style decay_type",
    "betas": "beta1 beta2 adam_beta1 adam_beta2",
    "eps": "adam_eps adam_epsilon",
    "clip_norm": "clip_grad grad_clip max_norm max_grad_norm gradient_clipping",
    "checkpoint.every": "save_interval save_steps checkpoint_interval save_every",
    "keep": "save_total_limit keep_latest_k",
    "log_every": "log_interval log_freq logging_steps",
    "wandb": "wandb_project report_to",
    "compile": "torch_compile",
    # options of commands, which have no key in a run's file
    "--ranks": "gpu gpus num_gpus nproc nproc_per_node world_size",
    "--cluster": "gpu gpus num_gpus hardware accelerator world_size nodes",
    "--run-folder": "output output_dir out_dir save save_dir dump_folder",
    "--resume": "load load_dir resume_from resume_from_checkpoint",
    "--max-tokens": "max_new_tokens max_length",
}  # fmt: skip
"""Names in other trainers, separated by spaces, by field (with its section if several sections have such a field)."""

OTHER_VALUES = {
    "use_distributed_optimizer": " 1", "distributed_optimizer": " 1", "fsdp": " 3", "fsdp2": " 3", "use_fsdp": " 3",
    "data_parallel_shard_degree": ", the product of both degrees, with zero = 3 and zero_shard = this one",
    "data_parallel_replicate_degree": ", the product of both degrees",
    "num_layers_per_virtual_pipeline_stage": ", the stages of a rank: layers / pp / this",
    "pipeline_parallel_layers_per_stage": ", the stages of a rank: layers / pp / this",
    "recompute_activations": " selective", "activation_checkpointing": " full", "gradient_checkpointing": " full",
    "bf16": " bf16", "fp16": " fp16", "fp32": " fp32", "fp8": " fp8",
    "local_batch_size": ", with pp of a micro-batch",
    "min_lr": ", a fraction of the learning rate",
    "lr_warmup_fraction": ", a number of steps", "warmup_ratio": ", a number of steps",
}  # fmt: skip
"""What follows a field's name, by the name in another trainer, where the two have other values."""


def list_usual(name: str) -> list[str]:
    """Return the fields that other trainers call by a name; the name itself, if none.

    >>> list_usual("n_head"), list_usual("lr_decay_style"), list_usual("tp")
    (['heads'], ['optimizer.schedule'], ['tp'])
    """
    return [field for field, names in USUAL_NAMES.items() if name in names.split()] or [name]

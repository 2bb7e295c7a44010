"""Names of settings in other tools, and their names here.

    max_length, cutoff_len, sequence_len ─where_to_set─▶ "packcorpus calls it sequence_length"
    learning_rate in a corpus config     ─where_to_set─▶ "it belongs to packcorpus train, as --learning-rate"

The tools are TRL with its base Transformers, axolotl, LLaMA-Factory, Unsloth, torchtune, and ms-swift. The tables list
all settings of packcorpus, too, because users also write a setting in the wrong place.
"""

from __future__ import annotations

from typing import Literal

# Where a name was written: the config of a corpus, an entry of its `sources`, a command such as `pack`, or a training
# config or command.
Place = Literal["config", "source", "command", "training"]

# Settings of a corpus, and their names in other tools.
CONFIG = {
    "name": "corpus_name",
    "sources": "dataset datasets data data_path data_files dataset_name dataset_path dataset_id dataset_dir "
    "dataset_info dataset_mixture train_dataset train_data train_file train_files pretraining_dataset _component_ "
    "custom_dataset_info",
    "roles": "role_map role_mapping mapping",
    "tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path tokenizer_config tokenizer_model tokenizer_id "
    "processor_name_or_path base_model model model_name model_name_or_path model_id model_id_or_path model_path "
    "pretrained_model_name_or_path",
    "template": "chat_template chat_template_path chat_template_jinja chat_template_file prompt_template template_type "
    "use_chat_template tool_format agent_template template_backend",
    "sequence_length": "max_length max_len max_seq_length max_seq_len max_sequence_length sequence_len seq_len "
    "seq_length cutoff_len cutoff_length packing_length model_max_length block_size context_length "
    "pad_to_multiple_of max_tokens_per_row",
    "mix": "",
    "align": "",
    "padding": "pad_to_sequence_len pad_to_max_length padding_side",
    "train_on": "train_on_inputs train_on_input train_on_prompt train_on_responses_only roles_to_train mask_history "
    "masking_strategy assistant_only_loss completion_only_loss loss_scale message_field_training train_on_eos "
    "train_on_eot response_template instruction_template",
    "pairs": "",
    "train_parts": "message_field_training_detail",
    "turns": "",
    "split_at": "",
    "reasoning": "split_thinking field_thinking template_thinking_key",
    "empty_reasoning": "ignore_empty_think add_non_thinking_prefix disable_ignore_empty_think",
    "template_options": "chat_template_kwargs enable_thinking preserve_thinking",
    "default_system": "default_system_message default_system_prompt system_prompt system_message system "
    "new_system_prompt",
    "share": "",
    "loss_weight": "loss_weights is_binary_loss_scale",
    "overlong": "truncation truncation_mode truncation_side truncation_strategy excess_length_strategy "
    "split_across_pack packing_strategy",
    "validation": "val_set_size val_size val_split validation_size validation_split test_size test_split_size "
    "eval_split eval_packing eval_sample_packing split_dataset_ratio",
    "validation_by": "",
    "max_rejects": "strict",
    "weighting": "mix_strategy mixing_strategy stopping_strategy interleave_probs interleave_prob dataset_probs",
    "duplicates": "dataset_exact_deduplication deduplicate dedup",
    "decontaminate": "decontamination",
    "min_tokens": "min_sample_len min_length min_seq_len",
    "max_tokens": "",
    "min_turns": "",
    "max_turns": "",
    "neighbors": "",
    "epochs": "num_epochs num_train_epochs n_epochs train_epochs max_epochs nb_epochs",
    "order": "curriculum_sampling sample_packing_sequentially",
    "balance": "",
    "license": "",
    "language": "",
    "packing": "packed sample_packing use_packing neat_packing sample_packing_group_size sample_packing_bin_size "
    "multipack_real_batches max_packs",
    "seed": "data_seed shuffle shuffle_seed shuffle_dataset dataset_shuffle shuffle_merged_datasets random_seed "
    "random_state",
    "eos_token": "map_eos_token special_tokens",
    "pad_token": "",
    "content_tokens": "",
    "vocab_size": "",
    "template_date": "",
    "engine": "",
    "part_size": "",
    "max_record_bytes": "",
}

# Settings of an entry of `sources`.
SOURCE = {
    "path": "file_name hf_hub_url ms_hub_url cloud_file_name script_url",
    "format": "type formatting ds_type dataset_type conversation_style",
    "columns": "field_messages field_instruction field_output field_input field_system field_tools "
    "message_property_mappings message_field_role message_field_content dataset_text_field column_map "
    "conversation_column input_columns text_column tags",
    "roles": "role_tag user_tag assistant_tag",
    "delimiter": "",
    "encoding": "",
    "ignore": "",
    "drop_roles": "drop_system_message",
    "weight": "interleave_probs interleave_prob dataset_probs probability proportion sampling_weight dataset_weight "
    "ratio",
    "limit": "max_samples num_samples max_train_samples n_samples shards shards_idx subset",
    "split": "",
}

# Settings of a training run, each also an option of `packcorpus train`.
TRAINING = {
    "base_model": "model model_name model_name_or_path model_id model_id_or_path model_path base_model_config "
    "base_model_name pretrained_model_name_or_path checkpointer checkpoint_dir",
    "tokenizer": "",
    "output": "output_dir save_dir run_name output_path",
    "load": "",
    "allow_unisolated": "",
    "device": "use_cpu no_cuda device_map",
    "gpus": "nproc_per_node num_gpus n_gpus num_processes",
    "loader_workers": "dataloader_num_workers num_workers",
    "precision": "bf16 fp16 tf32 dtype torch_dtype mixed_precision",
    "attention": "attn_implementation attn_impl flash_attention flash_attention_2 flash_attn use_flash_attn "
    "sdp_attention xformers_attention flex_attention eager_attention",
    "quantization": "load_in_4bit load_in_8bit quantization_bit quant_bits quant_method bnb_4bit_quant_type "
    "bnb_4bit_compute_dtype quantization_method",
    "sharding": "fsdp fsdp_config fsdp_version deepspeed zero_stage",
    "lora_r": "lora_rank r rank",
    "lora_alpha": "alpha",
    "lora_dropout": "",
    "lora_targets": "lora_target lora_target_modules target_modules lora_target_linear lora_attn_modules "
    "apply_lora_to_mlp apply_lora_to_output",
    "lora_variant": "use_rslora use_dora peft_use_rslora peft_use_dora",
    "modules_to_save": "lora_modules_to_save additional_target",
    "adapter": "lora_model_dir adapter_name_or_path adapters",
    "activation_checkpointing": "gradient_checkpointing gradient_checkpointing_kwargs use_gradient_checkpointing "
    "enable_activation_checkpointing enable_activation_offloading activation_offloading",
    "compile": "torch_compile torch_compile_backend torch_compile_mode",
    "fused_loss": "use_liger_kernel liger_kernel_config enable_liger_kernel cut_cross_entropy",
    "optimizer": "optim optim_args",
    "learning_rate": "lr peak_lr max_lr",
    "schedule": "lr_scheduler lr_scheduler_type lr_scheduler_kwargs lr_schedule scheduler",
    "warmup": "warmup_ratio warmup_steps num_warmup_steps",
    "weight_decay": "wd",
    "max_grad_norm": "gradient_clipping clip_grad_norm max_norm grad_clip",
    "epochs": "num_epochs num_train_epochs n_epochs train_epochs max_epochs nb_epochs",
    "max_steps": "num_steps total_steps train_steps max_train_steps max_steps_per_epoch num_training_steps train_iters",
    "tokens_per_step": "batch_size train_batch_size global_batch_size total_batch_size gradient_accumulation_steps "
    "grad_accum",
    "micro_batch": "micro_batch_size per_device_train_batch_size per_gpu_train_batch_size auto_find_batch_size",
    "eval_every": "eval_steps eval_strategy evaluation_strategy evals_per_epoch eval_interval eval_on_start do_eval",
    "keep": "load_best_model_at_end metric_for_best_model",
    "early_stopping": "early_stopping_patience",
    "samples": "predict_with_generate eval_table_size",
    "save_every": "save_steps save_strategy save_interval saves_per_epoch",
    "report_to": "use_wandb wandb_project wandb_entity wandb_name wandb_run_id wandb_watch wandb_log_model "
    "mlflow_tracking_uri mlflow_experiment_name use_tensorboard logging_dir metric_logger",
    "profile": "profiler",
    "seed": "",
}

# Options of `packcorpus pack`, beyond its settings.
OPTIONS = {
    "workers": "num_proc dataset_num_proc dataset_processes preprocessing_num_workers preprocessing_batch_size "
    "packing_num_proc",
}

# Settings of a corpus that the commands also take as options.
OF_COMMANDS = ("tokenizer", "template", "sequence_length", "name")

# Names that have no place here, by the reason.
WITHOUT = {
    "prepared data is kept by its content and never stale": "overwrite_cache load_from_cache_file tokenized_path "
    "dataset_prepared_path cached_dataset cached_val_dataset lazy_tokenize download_mode dataset_kwargs",
    "a corpus is prepared once, in parts, with little memory": "streaming buffer_size shuffle_buffer_size "
    "skip_prepare_dataset remove_unused_columns",
    "rows are full, and conversations in a row never see each other": "padding_free group_by_length "
    "train_sampling_strategy length_column_name ignore_pad_token_for_loss",
    "list these files in `sources`, each with split: validation, or hold out a share with `validation`": "eval_dataset "
    "val_dataset test_datasets val_dataset_shuffle eval_file validation_file",
    "packcorpus prepares conversations for supervised fine-tuning only": "stage rl rlhf_type reward_model loss_type "
    "pref_loss",
    "packcorpus train trains an adapter on 4-bit weights: QLoRA": "finetuning_type tuner_type train_type task_type "
    "do_train model_type tokenizer_type peft_config use_peft full_finetuning",
    "code of a model or a tokenizer is never run": "trust_remote_code",
    "every step is logged": "logging_steps logging_strategy logging_first_step log_every_n_steps log_level",
    "the same command resumes an interrupted run": "resume_from_checkpoint auto_resume_from_checkpoints do_resume "
    "overwrite_output_dir",
    "the newest two checkpoints are kept": "save_total_limit save_only_model save_first_step",
    "packcorpus train has no such setting": "adam_beta1 adam_beta2 adam_epsilon label_smoothing_factor "
    "neftune_noise_alpha ddp_timeout ddp_backend ddp_find_unused_parameters dataloader_pin_memory "
    "dataloader_prefetch_factor dataloader_drop_last per_device_eval_batch_size plot_loss "
    "average_tokens_across_devices torch_empty_cache_steps accelerator_config full_determinism plugins debug",
    "packcorpus push uploads a corpus, and hf upload an adapter": "push_to_hub hub_model_id hub_token hub_strategy "
    "hub_private_repo",
}


def where_to_set(name: str, place: Place) -> str:
    """Return where to set what another tool calls `name`, or "" if it is not known.

    `name` may be an option, such as --lr. The result continues a message, such as "packcorpus calls it epochs".
    """
    wanted = name.strip("-").partition("=")[0].replace("-", "_").lower()
    config, source, training, option = (_ours(wanted, table) for table in (CONFIG, SOURCE, TRAINING, OPTIONS))
    if called := {"training": training, "source": source}.get(place):
        return f"use --{called.replace('_', '-')}" if name.startswith("-") else f"packcorpus calls it {called}"
    ways = []
    if place == "command" and (config in OF_COMMANDS or option):
        ways.append(f"use --{(option or config).replace('_', '-')}")
    elif config:
        ways.append(f"{'packcorpus calls it' if place == 'config' else 'the config of a corpus has it, as'} {config}")
    elif option:
        ways.append(f"packcorpus pack has it, as --{option}")
    if source:
        ways.append(f"an entry of `sources` has it, as {source}")
    if training:
        ways.append(f"packcorpus train has it, as --{training.replace('_', '-')}")
    if reason := "" if ways else _ours(wanted, WITHOUT):
        ways.append(f"leave it out: {reason}")
    return "; ".join(ways)


def _ours(name: str, table: dict[str, str]) -> str:
    """Return the key of a table that is this name or has it as another name, or ""."""
    return name if name in table else next((ours for ours, theirs in table.items() if name in theirs.split()), "")

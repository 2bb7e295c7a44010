"""Every setting of another tool leads to its place here, not to a list of all."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import BIN, command

from packcorpus.tasks.config import KEYS, Config
from packcorpus.tasks.core.errors import UsageError
from packcorpus.tasks.core.other_tools import CONFIG, OF_COMMANDS, SOURCE, TRAINING, WITHOUT, where_to_set
from packcorpus.tasks.core.yaml_settings import check_settings
from packcorpus.tasks.sources.model import Source
from packcorpus.train.config import TrainingConfig, settings_parser

# Names that configs and scripts of these tools have, as in their own examples.
TRL = """
output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs
warmup_steps warmup_ratio optim weight_decay gradient_accumulation_steps max_grad_norm bf16 fp16 tf32
gradient_checkpointing gradient_checkpointing_kwargs torch_compile use_liger_kernel neftune_noise_alpha logging_steps
logging_strategy report_to run_name eval_strategy eval_steps per_device_eval_batch_size save_strategy save_steps
save_total_limit push_to_hub hub_model_id load_best_model_at_end metric_for_best_model data_seed use_cpu
dataloader_num_workers dataloader_pin_memory remove_unused_columns fsdp fsdp_config deepspeed ddp_timeout
resume_from_checkpoint trust_remote_code chat_template_path dataset_text_field dataset_kwargs dataset_num_proc
max_length max_seq_length truncation_mode shuffle_dataset packing_strategy padding_free pad_to_multiple_of
eval_packing completion_only_loss assistant_only_loss loss_type activation_offloading model_name_or_path dataset_name
test_split_size load_in_4bit use_peft lora_r lora_target_modules attn_implementation torch_dtype dtype
"""
AXOLOTL = """
base_model model_type tokenizer_type hub_model_id plugins load_in_8bit load_in_4bit chat_template chat_template_jinja
datasets type ds_type data_files field_messages message_property_mappings roles_to_train train_on_eos
message_field_training message_field_training_detail field_thinking template_thinking_key split_thinking field_tools
dataset_prepared_path val_set_size output_dir adapter lora_model_dir sequence_len sample_packing eval_sample_packing
pad_to_sequence_len excess_length_strategy lora_r lora_alpha lora_dropout lora_target_modules lora_target_linear
gradient_accumulation_steps micro_batch_size num_epochs optimizer lr_scheduler learning_rate train_on_inputs bf16 tf32
gradient_checkpointing resume_from_checkpoint logging_steps attn_implementation flash_attention warmup_ratio
warmup_steps evals_per_epoch saves_per_epoch weight_decay special_tokens wandb_project wandb_entity wandb_watch
wandb_name wandb_log_model default_system_message chat_template_kwargs dataset_processes min_sample_len
dataset_exact_deduplication shuffle_merged_datasets shards shards_idx drop_system_message pretraining_dataset rl
test_datasets peft_use_dora peft_use_rslora lora_modules_to_save early_stopping_patience deepspeed fsdp
"""
LLAMA_FACTORY = """
model_name_or_path adapter_name_or_path trust_remote_code stage do_train finetuning_type lora_rank lora_target
additional_target use_dora use_rslora quantization_bit quantization_method dataset dataset_dir eval_dataset
cutoff_len max_samples overwrite_cache preprocessing_num_workers preprocessing_batch_size tokenized_path output_dir
logging_steps save_steps plot_loss overwrite_output_dir per_device_train_batch_size gradient_accumulation_steps
learning_rate num_train_epochs lr_scheduler_type warmup_ratio bf16 ddp_timeout val_size per_device_eval_batch_size
eval_strategy eval_steps train_on_prompt mask_history streaming buffer_size mix_strategy interleave_probs
neat_packing tool_format enable_thinking file_name formatting hf_hub_url cloud_file_name num_samples tags
flash_attn resume_from_checkpoint
"""
TORCHTUNE = """
output_dir model checkpointer dataset batch_size optimizer lr_scheduler max_steps_per_epoch
gradient_accumulation_steps clip_grad_norm compile metric_logger log_every_n_steps dtype
enable_activation_checkpointing enable_activation_offloading profiler lr lora_rank lora_attn_modules max_seq_len
packed split_across_pack train_on_input new_system_prompt masking_strategy conversation_style conversation_column
column_map prompt_template num_warmup_steps shuffle _component_ max_packs
"""
UNSLOTH = """
model_name max_seq_length load_in_4bit dtype chat_template mapping system_message map_eos_token r target_modules
use_gradient_checkpointing use_rslora random_state full_finetuning dataset_text_field dataset_num_proc
train_on_responses_only instruction_template response_template per_device_train_batch_size warmup_steps
num_train_epochs max_steps learning_rate optim lr_scheduler_type
"""
MS_SWIFT = """
model model_type train_type tuner_type dataset val_dataset split_dataset_ratio data_seed dataset_shuffle
interleave_prob stopping_strategy strict system max_length packing_length truncation_strategy agent_template
loss_scale dataset_num_proc packing_num_proc cached_dataset lazy_tokenize load_from_cache_file padding_free
num_train_epochs attn_impl torch_dtype lora_rank lora_alpha target_modules quant_bits quant_method
gradient_accumulation_steps per_device_train_batch_size learning_rate warmup_ratio eval_steps save_steps
save_total_limit logging_steps output_dir dataloader_num_workers enable_thinking add_non_thinking_prefix
template_backend use_chat_template padding_side streaming shuffle_buffer_size custom_dataset_info deepspeed
"""
TOOLS = {"TRL": TRL, "axolotl": AXOLOTL, "LLaMA-Factory": LLAMA_FACTORY, "torchtune": TORCHTUNE, "Unsloth": UNSLOTH,
         "ms-swift": MS_SWIFT}  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(("place", "model"), [("config", Config), ("source", Source), ("training", TrainingConfig)])
def test_every_name_of_a_tool_has_an_answer(tool: str, place: str, model: type) -> None:
    names = [name for name in TOOLS[tool].split() if name not in model.model_fields]
    given = {"sources": [{"path": "x"}]} if model is Config else {"path": "x"} if model is Source else {}
    for name in names:
        with pytest.raises(UsageError) as refused:
            check_settings(model, given | {name: 1}, "a.yaml")
        lines = str(refused.value).splitlines()
        assert lines[1:] == [f"  {name}: unknown key; {where_to_set(name, place)}"]
        assert where_to_set(name, place), name
        assert "did you mean" not in lines[1]
        assert len(lines[1]) < 160, lines[1]


@pytest.mark.parametrize(
    ("place", "name", "answer"),
    [
        ("config", "max_length", "packcorpus calls it sequence_length"),
        ("config", "num_epochs", "packcorpus calls it epochs; packcorpus train has it, as --epochs"),
        ("config", "base_model", "packcorpus calls it tokenizer; packcorpus train has it, as --base-model"),
        ("config", "learning_rate", "packcorpus train has it, as --learning-rate"),
        ("config", "interleave_probs", "packcorpus calls it weighting; an entry of `sources` has it, as weight"),
        ("config", "dataset_num_proc", "packcorpus pack has it, as --workers"),
        ("config", "streaming", "leave it out: a corpus is prepared once, in parts, with little memory"),
        ("source", "type", "packcorpus calls it format"),
        ("source", "cutoff_len", "the config of a corpus has it, as sequence_length"),
        ("command", "--lr", "packcorpus train has it, as --learning-rate"),
        ("command", "--Max-Length", "use --sequence-length"),
        ("command", "--max_length=3", "use --sequence-length"),
        ("command", "--num-proc", "use --workers"),
        ("command", "--validation", "the config of a corpus has it, as validation"),
        ("training", "--lr", "use --learning-rate"),
        ("training", "lr", "packcorpus calls it learning_rate"),
        ("training", "num_train_epochs", "packcorpus calls it epochs"),
        ("training", "sequence_length", "the config of a corpus has it, as sequence_length"),
        ("config", "zzz", ""),
    ],
)
def test_the_answer_depends_on_the_place(place: str, name: str, answer: str) -> None:
    assert where_to_set(name, place) == answer


def test_an_option_of_another_tool_names_the_place(tmp_path: Path) -> None:
    done = command(tmp_path, str(BIN / "packcorpus"), "pack", "a.jsonl", "--max-length", "512")
    assert (
        done.stderr == "E101 error: --max-length: no such option; use --sequence-length; see packcorpus pack --help\n"
    )
    with pytest.raises(UsageError, match=r"unrecognized arguments: --lr.*; use --learning-rate; see "):
        settings_parser("packcorpus train", "").parse_args(["--manifest", "a", "--lr", "1e-4"])
    with pytest.raises(UsageError, match=r"--cutoff-len.*; the config of a corpus has it, as sequence_length; see "):
        settings_parser("packcorpus train", "").parse_args(["--manifest", "a", "--cutoff-len=512"])


def test_the_tables_list_the_settings_and_no_name_twice() -> None:
    """A new setting is one line in a table, so that it is known everywhere."""
    assert {name for name in Config.model_fields if not KEYS[name].advanced} <= set(CONFIG) <= set(Config.model_fields)
    assert set(TRAINING) == set(TrainingConfig.model_fields)
    assert set(SOURCE) <= set(Source.model_fields)
    assert set(OF_COMMANDS) <= set(CONFIG)
    for table in (CONFIG, SOURCE, TRAINING, WITHOUT):
        names = [name for theirs in table.values() for name in theirs.split()]
        assert len(names) == len(set(names))
    known = {name for table in (CONFIG, SOURCE, TRAINING) for theirs in table.values() for name in theirs.split()}
    assert not known & {name for theirs in WITHOUT.values() for name in theirs.split()}

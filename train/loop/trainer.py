"""Extend the Trainer with measured steps and an exact validation loss.

    rows ─Trainer─▶ steps ─log─▶ loss, tokens/s, seconds of each phase, memory, MFU

Training itself is unchanged: transformers provides batches, loss, gradients, and optimizer.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.utils.data import ConcatDataset
from transformers import Trainer, TrainingArguments, get_scheduler

from packcorpus.tasks.core import process
from packcorpus.tasks.core.errors import DataError, UsageError
from packcorpus.tasks.storage.schemas import LOSS_WEIGHT
from packcorpus.train.config import ADAPTER_WEIGHTS, TrainingConfig
from packcorpus.train.evaluation import count_predicted
from packcorpus.train.measures import COMPUTE, Phases
from packcorpus.train.model.attention import autocast, dtype_of
from packcorpus.train.model.qlora import data_parallel, is_sharded, load_exactly

# Steps that fp16 may skip in a row. Each skipped step halves the scale, from 65536 to 2^-14, the smallest normal number
# of fp16.
SKIPPED = 30
PROJECT = "packcorpus"  # name of the project in experiment trackers


def arguments(
    config: TrainingConfig, output: str, micro_batch: int, accumulation: int, device: str, precision: str
) -> dict[str, Any]:
    """Return the arguments of TrainingArguments, which SFTConfig extends."""
    if "wandb" in config.trackers:
        # transformers passes `project` only to the other trackers. A value that the user has set is kept.
        os.environ.setdefault("WANDB_PROJECT", PROJECT)
    return {
        "output_dir": output,
        "per_device_train_batch_size": micro_batch,
        "per_device_eval_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": config.epochs,
        "max_steps": config.max_steps or -1,
        "learning_rate": config.rate,
        "lr_scheduler_type": config.schedule,
        "warmup_steps": config.warmup,  # a value below 1 is a share of the steps
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.max_grad_norm,
        "optim": config.optimizer,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",  # with loss scaling
        "activation_checkpointing": False,  # train.model.checkpointing has turned it on; it is the default of TRL
        "logging_steps": 1,
        # The filter would show the mean of earlier losses instead of NaN.
        "logging_nan_inf_filter": False,
        "save_steps": config.save_every,
        "eval_strategy": "steps" if config.eval_every else "no",
        "eval_steps": config.eval_every,
        "report_to": config.trackers,
        "run_name": Path(output).name,
        "project": PROJECT,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "train_sampling_strategy": "sequential",  # StepRows are already in order
        "dataloader_num_workers": config.loader_workers,
        "use_cpu": device == "cpu",
        "seed": config.seed,
        "average_tokens_across_devices": True,
    }


class Measured(Trainer):
    """Trainer with measured steps and an exact validation loss."""

    control: Any
    lr_scheduler: Any

    def measure(self, share: float, flops: float, peak: float | None) -> None:
        """Begin to measure; `share` is the share of tokens that are not padding."""
        # `flops` is the useful work per token. `peak` is the FLOP/s of the devices of all ranks; without it, there is
        # no MFU.
        self.share, self.flops, self.peak = share, flops, peak
        self._phases = Phases(self.args.device)
        self._skipped = 0  # number of steps skipped in a row
        self._reset()

    def _reset(self) -> None:
        self._started: float | None = None
        self._waited = 0.0
        self._padded_tokens = 0
        self._tokens = self._trained = 0.0

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        loader.device = None  # _prepare_inputs copies batches instead, where the copy can be measured
        return loader

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the adapter of a checkpoint of this run."""
        weights = load_file(Path(resume_from_checkpoint) / ADAPTER_WEIGHTS)
        if not load_exactly(self.model if model is None else model, weights):
            raise UsageError(
                "run_folder_taken",
                f"{Path(resume_from_checkpoint).parent}: was trained with other weights of an adapter, such as experts "
                "of another rank, by an earlier version; set another `output`, or finish the run with that version",
            )

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the learning-rate schedule, of which no step has a rate of 0."""
        warmup = self.args.get_warmup_steps(num_training_steps)
        if warmup and self.lr_scheduler is None:
            # The schedules of transformers rise from 0, with which the first step would learn nothing, and fall to 0
            # after the last one. They are therefore shifted by a step.
            self.lr_scheduler = get_scheduler(
                self.args.lr_scheduler_type, optimizer or self.optimizer, warmup, num_training_steps + 1
            )
            self.lr_scheduler.step()
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        if self._started is None:
            self._started = time.perf_counter()
            self._phases.clear()
            self._scale = self._loss_scale()
        self._phases.enter("data")
        timed = self._timed(epoch_iterator)
        batches, trained = super().get_batch_samples(timed, num_batches, device)
        for batch in batches:
            self._padded_tokens += batch["labels"].numel()
            mask = batch.get("attention_mask")  # present if the collator pads the rows
            self._tokens += batch["labels"].numel() * self.share if mask is None else float(mask.sum())
        self._trained = float(trained)
        if not (batches and LOSS_WEIGHT in batches[0]):
            return batches, trained
        # The weighted loss of the step is divided by the sum of the weights of its tokens on all ranks.
        weight = torch.stack([batch[LOSS_WEIGHT][:, 1:].double().sum() for batch in batches]).sum().to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            weight = self.accelerator.gather(weight).sum()
        return batches, weight.float()

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches, and add up the seconds spent waiting for them."""
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self._waited += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    def training_step(self, *inputs: Any, **named: Any) -> Any:
        self._phases.enter("copy")
        loss = super().training_step(*inputs, **named)
        self._phases.enter("optimizer")  # the next micro-batch of the same step ends it at once
        return loss

    def compute_loss(self, *inputs: Any, **named: Any) -> Any:
        self._phases.enter("forward")
        # That of TRL calls the decoder and the head, and would skip what some models compute in between.
        loss = Trainer.compute_loss(self, *inputs, **named)
        self._phases.enter("backward")
        return loss

    def _maybe_log_save_evaluate(self, *inputs: Any, **named: Any) -> None:
        self._phases.enter("")
        super()._maybe_log_save_evaluate(*inputs, **named)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._started is not None:
            if not math.isfinite(logs["loss"]):
                raise DataError(
                    "loss_diverged",
                    f"the loss of step {self.state.global_step} is {logs['loss']}; nothing was saved after the newest "
                    f"checkpoint. Lower learning_rate, {'set precision: fp32, ' * self.args.fp16}or examine the rows "
                    "with `packcorpus inspect --row N`",
                )
            logs |= self._scaling() | self._measures(time.perf_counter() - self._started)
            self._reset()
        super().log(logs, start_time)

    def _loss_scale(self) -> float:
        """Return the scale of the loss, which keeps small gradients in the range of fp16."""
        return self.accelerator.scaler.get_scale() if self.args.fp16 else 1.0

    def _scaling(self) -> dict[str, float]:
        """Return the loss scale, and whether the step was skipped, for fp16."""
        if not self.args.fp16:
            return {}
        scale = self._loss_scale()
        skipped = scale < self._scale  # accelerate does not report it, because a fused optimizer skips a step itself
        self._skipped = self._skipped + 1 if skipped else 0
        if self._skipped == SKIPPED:
            raise DataError(
                "loss_diverged",
                f"the gradients of the last {SKIPPED} steps, up to step {self.state.global_step}, exceed the range of "
                "fp16, however small the loss is scaled; set precision: fp32",
            )
        return {"loss_scale": scale, "skipped": float(skipped)}

    def _measures(self, seconds: float) -> dict[str, float]:
        """Return the measurements of one optimizer step, with tokens of all ranks."""
        ranks, device = self.args.world_size, self.args.device
        on_gpu = device.type == "cuda"
        rate = self._padded_tokens * ranks / seconds
        measures = {
            "step_seconds": seconds,
            "data_wait": self._waited / seconds,
            "tokens_per_second": rate,
            "non_pad_tokens_per_second": self._tokens * ranks / seconds,
            "trained_tokens_per_second": self._trained / seconds,
            "memory_bytes": float(torch.cuda.max_memory_allocated(device) if on_gpu else process.peak_memory()),
        }
        phases = self._phases.take()
        measures |= {f"{phase}_seconds": spent for phase, spent in phases.items()}
        if on_gpu:
            measures["gpu_share"] = sum(phases[phase] for phase in COMPUTE) / seconds
            memory = torch.cuda.get_device_properties(device).total_memory
            measures["memory_share"] = measures["memory_bytes"] / memory
        return measures | ({"mfu": rate * self.flops / self.peak} if self.peak else {})

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Compute the mean loss and accuracy of trained tokens; each row counts once."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        self.model.eval()
        sums = torch.zeros(5, dtype=torch.float64, device=self.args.device)
        with torch.no_grad():
            for batch, counts in self._batches_of_rank(dataset):
                tokens, weights = (batch["labels"][:, 1:] != -100).sum(), batch.get(LOSS_WEIGHT)
                weight = torch.zeros((), device=tokens.device) if weights is None else weights[:, 1:].double().sum()
                # In a run that lacks only its record, the model was not prepared and lacks its own autocast.
                with self.compute_loss_context_manager(), autocast(self.args.device, dtype_of(self.args)):
                    outputs = self.model(**batch)
                    right = count_predicted(outputs, batch["labels"])
                loss = outputs["loss"].double()
                mean = loss if weights is None else outputs["token_loss"].double()
                found = (mean * tokens, tokens.double(), right.double(), loss * weight, weight.double())
                sums += counts * torch.stack(found)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
        self.model.train()
        loss, _, accuracy, *_ = (sums / sums[1]).tolist()
        metrics = {f"{metric_key_prefix}_loss": loss, f"{metric_key_prefix}_token_accuracy": accuracy}
        if sums[4]:
            metrics[f"{metric_key_prefix}_weighted_loss"] = float(sums[3] / sums[4])
        self._started = None  # evaluation is not part of a step
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _batches_of_rank(self, dataset: Any) -> Iterator[tuple[dict[str, torch.Tensor], bool]]:
        """Yield batches, and whether they count."""
        # All ranks yield the same number of batches, because they may share the weights of a model.
        size = self.args.per_device_eval_batch_size
        for part in dataset.datasets if isinstance(dataset, ConcatDataset) else [dataset]:  # rows of one length each
            mine = range(self.args.process_index, len(part), self.args.world_size)
            for start in range(0, math.ceil(len(part) / self.args.world_size), size):
                rows = [part[row] for row in mine[start : start + size] or range(1)]
                yield self._prepare_inputs(self.data_collator(rows)), start < len(mine)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if training and is_sharded(model):
            return data_parallel(model, self.accelerator)
        return super()._wrap_model(model, training, dataloader)


def one_gpu(args: TrainingArguments) -> TrainingArguments:
    """Use one GPU per process even if more are visible."""
    # Otherwise, the Trainer multiplies the batch by the number of GPUs and wraps the model in DataParallel.
    assert args.device  # reading it counts the GPUs, once
    args._n_gpu = 1
    return args


def packed_trainer(model: Any, given: dict[str, Any], collator: Any, train: Any, validation: Any) -> Measured:
    """Build the Trainer for packed rows."""
    args = one_gpu(TrainingArguments(**given))
    return Measured(model, args, collator, train_dataset=train, eval_dataset=validation)


def conversation_trainer(
    model: Any, given: dict[str, Any], collator: Any, train: Any, validation: Any, padding: Any
) -> Any:
    """Build TRL's SFTTrainer for tokenized conversations (format 2.0)."""
    from trl import SFTConfig, SFTTrainer  # takes seconds to load

    from packcorpus.train.data.conversations import SFT_SETTINGS

    class ConversationTrainer(Measured, SFTTrainer):
        pass

    adapter = {name: weights.detach().clone() for name, weights in model.named_parameters() if weights.requires_grad}
    args = one_gpu(SFTConfig(**given, **SFT_SETTINGS))
    trainer = ConversationTrainer(
        model, args=args, data_collator=collator, train_dataset=train, eval_dataset=validation, processing_class=padding
    )
    # TRL converts the adapter of a quantized model to bf16, which is too coarse for small steps.
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name in adapter:
                weights.data = adapter[name]
    return trainer

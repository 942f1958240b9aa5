"""TRL under measurement: transformers' generation and TRL's own GRPO trainer. Runs in its own environment, on the CPU.

Started by `python -m benchmarks`; answers its questions. Its settings cost it no speed that it need not spend: no
reference model, nothing saved or reported, the whole batch at once.
"""

from __future__ import annotations

import json
import re
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from benchmarks import shapes
from benchmarks.child import peak_bytes, serve, timed
from benchmarks.shapes import Learning, Sampling

logging.set_verbosity_error()


def load(folder: str) -> tuple[Any, Any]:
    """Returns model and tokenizer of a published folder. Prompts are padded on the left, as generation wants it."""
    config = json.loads((Path(folder) / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, config["torch_dtype"]))
    return model, AutoTokenizer.from_pretrained(folder, padding_side="left")


LOADED: dict[str, Any] = {}  # folder -> model and tokenizer
OPENED: dict[str, str] = {}  # sampling case -> folder


def open_sampling(folder: str, case: list[Any]) -> None:
    """Prepares a sampling case, and runs it once."""
    case = Sampling(*case)
    if folder not in LOADED:
        LOADED[folder] = load(folder)
        LOADED[folder][0].eval()
    OPENED[case.name] = folder
    sample(case, 0)


def sample(case: list[Any] | Sampling, seed: int) -> dict[str, Any]:
    """Runs a sampling call on texts that `seed` chooses, `slots` rows at a time. Returns seconds and useful tokens.

    Generation goes on until the longest row of its batch is done, and computes all rows in every step. Its cache grows
    with the rows, so a longer one cannot be allocated.
    """
    case = Sampling(*case)
    model, tokenizer = LOADED[OPENED[case.name]]
    texts = [text for text in shapes.prompts(case, model.config.vocab_size, seed)
             for _ in range(case.samples)]  # fmt: skip
    lengths = shapes.lengths(case)
    torch.manual_seed(seed)

    def call() -> list[str]:
        completions = []
        for first in range(0, len(texts), case.slots):
            ends = lengths[first : first + case.slots]
            given = tokenizer(texts[first : first + case.slots], return_tensors="pt", padding=True)
            with torch.inference_mode():
                out = model.generate(
                    **given, max_new_tokens=int(ends.max()), do_sample=True, temperature=1.0, top_k=0, top_p=1.0
                )
            drawn = out[:, given["input_ids"].shape[1] :].tolist()
            completions += tokenizer.batch_decode(
                [row[:end] for row, end in zip(drawn, ends)], skip_special_tokens=True
            )
            if out.shape[1] != given["input_ids"].shape[1] + ends.max():
                raise ValueError(f"{case.name}: {out.shape[1]} columns")
        return completions

    seconds, completions = timed(call)
    return {"seconds": seconds, "tokens": int(lengths.sum()), "text": completions[0][:80]}


class Gate(TrainerCallback):
    """Lets the trainer's own loop make one step at a time, when it is asked to."""

    def __init__(self) -> None:
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.failure: BaseException | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.go.acquire()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.done.release()

    def run(self, trainer: GRPOTrainer) -> None:
        try:
            trainer.train()
        except BaseException as failure:
            self.failure = failure
            self.done.release()

    def step(self) -> None:
        self.go.release()
        self.done.acquire()
        if self.failure is not None:
            raise self.failure


OPEN: dict[str, tuple[GRPOTrainer, Gate, Learning]] = {}  # learning case -> its trainer


def open_learning(folder: str, scratch: str, case: list[Any]) -> None:
    """Opens a trainer on the published model, up to where its first step begins."""
    case = Learning(*case)
    model, tokenizer = load(folder)
    asked = Sampling("", 64 * case.prompts, 1, case.prompt_length)
    data = Dataset.from_dict({"prompt": shapes.prompts(asked, model.config.vocab_size, 0)})
    gate = Gate()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        processing_class=tokenizer,
        train_dataset=data,
        callbacks=[gate],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(dir=scratch),
            per_device_train_batch_size=case.sequences,
            num_generations=case.samples,
            gradient_accumulation_steps=1,
            max_completion_length=case.completion_length,
            num_iterations=1,
            beta=0.0,
            loss_type="grpo",
            temperature=1.0,
            learning_rate=shapes.LEARNING_RATE,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            max_grad_norm=1.0,
            max_steps=10**6,
            logging_steps=10**6,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        ),
    )
    if case.lengths != "full":
        with_lengths(trainer.model, shapes.lengths(case), tokenizer.eos_token_id)
    OPEN[case.name] = trainer, gate, case


def with_lengths(model: Any, lengths: np.ndarray, end: int) -> None:
    """Makes generation end when the longest row is done, and puts END at the end of shorter rows, as if it had been
    drawn there."""
    generate = model.generate

    def generate_lengths(*arguments: Any, generation_config: Any, **given: Any) -> torch.Tensor:
        full = generation_config.max_new_tokens
        generation_config.max_new_tokens = int(lengths.max())
        out = generate(*arguments, generation_config=generation_config, **given)
        generation_config.max_new_tokens = full
        start = out.shape[1] - int(lengths.max())
        for row, length in enumerate(lengths):
            if length < full:
                out[row, start + length - 1] = end
        return out

    model.generate = generate_lengths


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(re.fullmatch(shapes.PATTERN, text, flags=re.DOTALL) is not None) for text in completions]


def step(case: list[Any], seed: int) -> dict[str, Any]:
    """Makes a whole step with the trainer's own loop. Returns its seconds and useful tokens."""
    trainer, gate, case = OPEN[Learning(*case).name]
    if seed == 0:
        threading.Thread(target=gate.run, args=(trainer,), daemon=True).start()
    seconds, _ = timed(gate.step)
    return {"seconds": seconds, "tokens": int(shapes.lengths(case).sum())}


def update(case: list[Any], seed: int) -> dict[str, Any]:
    """Learns from a given batch with the trainer's own loss and optimizer. Returns its seconds, loss and the like."""
    trainer, _, case = OPEN[Learning(*case).name]
    model = trainer.model
    if trainer.optimizer is None:
        trainer.create_optimizer_and_scheduler(num_training_steps=10**6)
        trainer.current_gradient_accumulation_steps = 1
    given = shapes.batch(case, model.config.vocab_size, seed)
    prompt, completion = np.split(given.tokens, [given.prompt_length], axis=1)
    mask = np.arange(completion.shape[1])[None, :] < given.lengths[:, None]
    inputs = {
        "prompt_ids": torch.tensor(prompt, dtype=torch.long),
        "prompt_mask": torch.ones(prompt.shape, dtype=torch.long),
        "completion_ids": torch.tensor(completion, dtype=torch.long),
        "completion_mask": torch.tensor(mask.astype(np.int64)),
        "advantages": torch.tensor(given.advantages),
        "num_items_in_batch": torch.tensor(int(given.lengths.sum())),
    }
    logprobs = None
    if seed == 0:  # asked once, before the timed runs
        with torch.no_grad():
            values = model(torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)).logits
        values = torch.log_softmax(values[:, given.prompt_length - 1 : -1], dim=-1)
        values = values.gather(-1, inputs["completion_ids"][..., None])[..., 0]
        logprobs = float((values * inputs["completion_mask"]).sum())
    model.train()

    def call() -> tuple[Any, Any]:
        loss = trainer.compute_loss(model, inputs)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        model.zero_grad()
        return loss, norm

    seconds, (loss, norm) = timed(call)
    tokens = int((given.prompt_length + given.lengths).sum())
    return {"seconds": seconds, "tokens": tokens, "loss": float(loss), "gradient_norm": float(norm),
            "logprobs": logprobs}  # fmt: skip


if __name__ == "__main__":
    serve(open_sampling, sample, open_learning, step, update, peak_bytes)

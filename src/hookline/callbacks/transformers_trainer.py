"""A watch for the Trainer of Hugging Face transformers: `Trainer(..., callbacks=[TrainerWatch()])`."""

from __future__ import annotations

from typing import Any

from hookline._kernel import Where
from hookline._watch.watch import Watcher, watch
from hookline.errors import HooklineError

try:
    from transformers import TrainerCallback
except ImportError:
    raise HooklineError("TrainerWatch needs transformers: pip install 'hookline[transformers]'") from None


class TrainerWatch(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Watch the model while a Trainer trains it.

    The options are those of `hl.watch`. Statistics go to `trainer.state.log_history`, or through `trainer.log` if you
    pass the trainer: `trainer.add_callback(TrainerWatch(trainer=trainer, every=100))`. A Trainer does not tell its
    callbacks that training failed. A BadValue ends the watch; after any other error, call `close()`.
    """

    def __init__(
        self, *where: Where, trainer: Any = None, every: int | None = None, to: Any = None, **options: Any
    ) -> None:
        self._where, self._every, self._to, self._options = where, every, to, options
        self._trainer = trainer
        self._waiting: list[tuple[int, dict[str, float]]] = []
        self.watch: Watcher | None = None

    def close(self) -> None:
        """End the watch."""
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the watch with training."""
        self.close()
        to = self._to
        if to is None and self._every is not None:

            def to(step: int, numbers: Any) -> None:
                self._waiting.append((step, dict(numbers)))

        # The optimizer is accelerate's wrapper, which holds the scaler.
        holders = getattr(self._trainer, "accelerator", None), kwargs.get("optimizer")
        scaler = next((found for one in holders if (found := getattr(one, "scaler", None)) is not None), None)
        options = {"scaler": scaler, **self._options}
        self.watch = watch(kwargs["model"], *self._where, every=self._every, to=to, **options).__enter__()
        self.watch.follow_trainer(trains=True, close_on_error=True)  # A Trainer calls no callback on an exception.

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the statistics of this step."""
        if self.watch is not None:
            self.watch.settle()
        waiting, self._waiting = self._waiting, []
        for _step, numbers in waiting:
            if self._trainer is not None:
                self._trainer.log(numbers)
            else:
                state.log_history.append({**numbers, "step": state.global_step})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the watch with training."""
        if self.watch is not None:
            self.watch.__exit__(None, None, None)
            self.watch = None

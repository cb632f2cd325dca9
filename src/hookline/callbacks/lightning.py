"""A watch for Lightning: `Trainer(callbacks=[LightningWatch()])`."""

from __future__ import annotations

from typing import Any

from hookline._kernel import Where
from hookline._watch.watch import Watcher, watch
from hookline.errors import HooklineError

try:
    from lightning.pytorch import Callback
except ImportError:
    raise HooklineError("LightningWatch needs Lightning: pip install 'hookline[lightning]'") from None


class LightningWatch(Callback):  # type: ignore[misc, unused-ignore]
    """Watch the module while Lightning trains, validates, tests or predicts.

    The options are those of `hl.watch`. Statistics go to the trainer's loggers, unless `to=` names another place; the
    scaler of 16-bit training is found automatically.
    """

    def __init__(self, *where: Where, every: int | None = None, to: Any = None, **options: Any) -> None:
        self._where, self._every, self._to, self._options = where, every, to, options
        self.watch: Watcher | None = None
        self._begin = 0

    def close(self) -> None:
        """End the watch."""
        self._leave()

    def _leave(self, error: BaseException | None = None) -> None:
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.__exit__(None if error is None else type(error), error, None)

    def _open(self, trainer: Any, module: Any) -> None:
        if self.watch is not None:
            return
        to = self._to
        if to is None and self._every is not None:

            def to(step: int, numbers: Any) -> None:
                for logger in trainer.loggers:
                    logger.log_metrics(dict(numbers), step=self._begin + step)

        trains = trainer.state.fn == "fit"
        # In an evaluation, the trainer's loggers would get the step numbers of training a second time.
        every = self._every if trains or self._to is not None else None
        found = getattr(trainer.precision_plugin, "scaler", None)
        options = {"scaler": found, **self._options}
        self.watch = watch(module, *self._where, every=every, to=to if every else None, **options).__enter__()
        self.watch.follow_trainer(trains)  # Lightning begins with a validation (its sanity check), which is not a step.

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the watch with training, before Lightning's sanity check."""
        self._open(trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Note the step at which training starts or resumes."""
        self._begin = trainer.global_step

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Count calls from 0 again, since `training_step` may call parts of the module but not the module itself."""
        if self.watch is not None:
            self.watch.begin_pass()

    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        """Count calls from 0 again."""
        self.on_train_batch_start()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the watch, unless it began with training."""
        self._open(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End the watch, unless training continues."""
        if trainer.state.fn != "fit":
            self.close()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """End the watch with training."""
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the watch after an error, so that the module is left without hooks."""
        self._leave(exception)

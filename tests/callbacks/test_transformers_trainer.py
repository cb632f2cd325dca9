"""The callback for transformers' Trainer, run by the real package on a tiny model."""

from __future__ import annotations

import pytest

import hookline as hl
from tests.errors.wording import says
from tests.support.watch_models import Rows, WithLoss


class TestTrainer:
    @pytest.fixture
    def transformers(self):
        pytest.importorskip("accelerate")  # For its Trainer.
        return pytest.importorskip("transformers")

    def trainer(self, transformers, tmp_path, rows, **options):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            num_train_epochs=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            logging_steps=100,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **options,
        )
        trainer = transformers.Trainer(WithLoss(), arguments, train_dataset=rows)
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    def test_a_bad_value_ends_a_real_training_and_leaves_nothing(self, transformers, tmp_path):
        from hookline.callbacks import TrainerWatch

        trainer, callback = self.trainer(transformers, tmp_path, Rows(bad=3)), TrainerWatch()
        trainer.add_callback(callback)
        with pytest.raises(hl.BadValue, match=says("It came in with the")):
            trainer.train()
        assert not hl.attached(trainer.model)
        callback.close()

    def test_statistics_go_to_its_history_or_through_its_log(self, transformers, tmp_path):
        from hookline.callbacks import TrainerWatch

        trainer = self.trainer(transformers, tmp_path, Rows())
        trainer.add_callback(TrainerWatch(every=2))
        trainer.train()
        found = [(row["step"], row["rms/body.0"]) for row in trainer.state.log_history if "rms/body.0" in row]
        assert [step for step, _ in found] == [1, 3]
        assert not hl.attached(trainer.model)

        logged = []

        class Reporter(transformers.TrainerCallback):
            def on_log(self, args, state, control, logs=None, **kwargs):
                logged.append(dict(logs))

        trainer = self.trainer(transformers, tmp_path, Rows(), gradient_accumulation_steps=2)
        trainer.add_callback(Reporter())
        trainer.add_callback(TrainerWatch("body.*", trainer=trainer, every=1))
        trainer.train()
        assert len([row for row in logged if "update/body.2" in row]) == 2

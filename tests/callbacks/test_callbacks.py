"""The callbacks of Lightning and of transformers' Trainer, with the real packages on tiny models."""

from __future__ import annotations

import csv
import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hookline as hl
from tests.support.models import mlp

NAN = float("nan")


class Rows(Dataset):
    """Rows of numbers, of which one may be bad."""

    def __init__(self, bad=None):
        self.bad = bad

    def __len__(self):
        return 8

    def __getitem__(self, index):
        x = torch.full((4,), index / 8)
        return {"x": x * NAN if index == self.bad else x, "labels": torch.ones(2)}


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x, labels=None):
        output = self.body(x)
        return {"loss": (output - labels).square().mean(), "logits": output}


@pytest.mark.filterwarnings("ignore")
class TestLightning:
    @pytest.fixture
    def lightning(self):
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        return pytest.importorskip("lightning.pytorch")

    def module(self, lightning, calls_itself=False):
        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = mlp()

            def forward(self, x):
                return self.net(x)

            def training_step(self, batch, _):
                output = self(batch["x"]) if calls_itself else self.net(batch["x"])
                return (output - batch["labels"]).square().mean()

            def validation_step(self, batch, _):
                self.net(batch["x"])

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        return Module()

    def trainer(self, lightning, tmp_path, callback, **options):
        return lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            callbacks=[callback],
            default_root_dir=tmp_path,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            log_every_n_steps=1,
            **options,
        )

    def test_a_bad_value_ends_a_real_fit_and_leaves_nothing(self, lightning, tmp_path):
        from hookline.callbacks import LightningWatch

        module, callback = self.module(lightning), LightningWatch()
        trainer = self.trainer(lightning, tmp_path, callback, logger=False)
        with pytest.raises(hl.BadValue) as raised:
            trainer.fit(module, DataLoader(Rows(bad=5), batch_size=2))
        assert str(raised.value.site) == 'net.0:inputs["input"]'
        assert raised.value.step == 2
        assert callback.watch is None
        assert not hl.attached(module)

    def test_steps_and_forwards_are_those_of_the_training_also_where_the_module_itself_is_called(
        self, lightning, tmp_path
    ):
        from hookline.callbacks import LightningWatch

        module, got = self.module(lightning, calls_itself=True), []
        callback = LightningWatch(every=1, to=lambda step, _: got.append(step))
        trainer = self.trainer(lightning, tmp_path, callback, logger=False)
        with pytest.raises(hl.BadValue) as raised:  # Two batches of validation are tried first.
            trainer.fit(module, DataLoader(Rows(bad=5), batch_size=2), DataLoader(Rows(), batch_size=4))
        assert (raised.value.step, raised.value.forward) == (2, 4)
        assert got == [0, 1]

    def test_statistics_go_to_its_loggers(self, lightning, tmp_path):
        from lightning.pytorch.loggers import CSVLogger

        from hookline.callbacks import LightningWatch

        module, logger = self.module(lightning), CSVLogger(tmp_path)
        trainer = self.trainer(lightning, tmp_path, LightningWatch("net.*", every=2), logger=logger)
        trainer.fit(module, DataLoader(Rows(), batch_size=2), DataLoader(Rows(), batch_size=4))
        with open(tmp_path / "lightning_logs" / "version_0" / "metrics.csv", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["rms/net.0"]]
        assert [row["step"] for row in rows] == ["0", "2"]
        assert all(0 < float(row["update/net.2"]) < 1 for row in rows)
        assert not hl.attached(module)
        trainer.validate(module, DataLoader(Rows(), batch_size=4), verbose=False)
        with open(tmp_path / "lightning_logs" / "version_0" / "metrics.csv", newline="") as file:
            assert len([row for row in csv.DictReader(file) if row["rms/net.0"]]) == 2
        LightningWatch.on_exception(LightningWatch(), trainer, module, ValueError())  # Nothing is open.
        trainer.validate(module, DataLoader(Rows(), batch_size=4), verbose=False)
        assert not hl.attached(module)


class TestTrainer:
    @pytest.fixture
    def transformers(self):
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
        with pytest.raises(hl.BadValue, match="It came in with the arguments of WithLoss"):
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

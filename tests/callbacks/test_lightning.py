"""The Lightning callback, run by the real package on a tiny model."""

from __future__ import annotations

import csv
import logging

import pytest
import torch
from torch.utils.data import DataLoader

import hookline as hl
from tests.support.models import mlp
from tests.support.watch_models import Rows


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
        with pytest.raises(hl.BadValue) as raised:  # Lightning runs two validation batches first.
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
        LightningWatch.on_exception(LightningWatch(), trainer, module, ValueError())  # No watch is open.
        trainer.validate(module, DataLoader(Rows(), batch_size=4), verbose=False)
        assert not hl.attached(module)

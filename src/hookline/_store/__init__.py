"""The disk format: arrays of rows as safetensors shards, and one small record for each unit that is done."""

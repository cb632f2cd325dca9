"""Stores on disk: arrays of rows in safetensors files (shards), and one small record for each finished unit."""

"""JSONL files of prompts to JSONL files of answers."""

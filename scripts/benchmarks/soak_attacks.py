#!/usr/bin/env python3
"""Sixteen honest streams beside clients that attack a `specrun serve`: are answers right, and how much later do they come?

First the streams run alone. Then attackers join them: prompts of megabytes, as texts, ids, messages, tools and
`logit_bias`; thousands of idle connections; full queues; names of megabytes and control characters for the log. Each
honest body has a seed, so its text is known from the quiet time. Ends with status 1 if an honest text differs or fails,
if the median answer takes more than three times as long as in the quiet time, or if the server is not healthy at the end.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import httpx
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.benchmarks.soak import ROOT, make_body, make_pair, resources
from scripts.benchmarks.soak import find_url as wait_for_url
from specrun.processor import describe_processor

STREAMS = 16
BODIES = 64
SLOWEST = 3.0
"""Times the quiet median that the median answer may take."""
TEXT = "the cat sat on a mat; " * (7 << 20 >> 5)
IDLE_CONNECTIONS = 1100
FILES = 1024
"""Number of files that the server may open."""

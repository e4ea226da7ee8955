"""Options of ONNX Runtime's sessions: above all, which threads they have."""

from __future__ import annotations

import ctypes
import os
import weakref
from contextlib import suppress
from typing import Any

from specrun.devices.processor import num_threads
from specrun.errors import BackendError
from specrun.optional_packages import how_to_install, import_package

_OWN_POOL = {"session.force_spinning_stop": "1"}
"""Threads of an idle session that spin would slow down the session that works."""

_pool_process: int | None = None
"""The process that made the shared pool of threads."""
_sessions: weakref.WeakSet[Any] = weakref.WeakSet()


def import_ort() -> Any:
    """The onnxruntime module. Raises BackendError where it is not installed."""
    try:
        return import_package("onnxruntime")
    except ImportError as error:
        raise BackendError(f"onnxruntime is not installed: {how_to_install('onnxruntime')}") from error


def session_options(shared_pool: bool = False) -> tuple[Any, Any]:
    """The onnxruntime module, and options for a session.

    shared_pool: put the session on the pool of threads that all sessions of the process share. Once that pool exists,
    onnxruntime refuses sessions that want their own, those of other libraries too. So without it a session has its own
    pool, unless there is the shared one already. Raises BackendError.
    """
    global _pool_process
    ort, threads = import_ort(), num_threads()
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if shared_pool and _pool_process is None:
        with suppress(Exception):  # Another library may have made it.
            ort.set_global_thread_pool_sizes(threads, 1)
        _pool_process = os.getpid()
    if _pool_process not in (None, os.getpid()):
        raise BackendError(
            f"onnxruntime's shared pool was made in process {_pool_process}, and its threads do not exist in process "
            f"{os.getpid()}, which was forked from it; start this process anew (multiprocessing's spawn), or open the "
            "decoder there with shared_thread_pool False"
        )
    if _pool_process:
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        for name, value in _OWN_POOL.items():
            options.add_session_config_entry(name, value)
    return ort, options


def keep_in_children(session: Any) -> None:
    """Never destroy ``session`` in a process that is forked from this one.

    Its threads do not exist there, and its destructor would wait for them for ever, even when the process exits.
    """
    if not _sessions and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_keep_sessions)
    _sessions.add(session)


def _keep_sessions() -> None:
    for session in _sessions:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))

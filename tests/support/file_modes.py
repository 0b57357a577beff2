"""Files that are read-only for root, too."""

import ctypes
import os
import sys


def respect_file_modes() -> None:
    """Give up the right of root to write to files that are read-only (capset(2), for this process only)."""
    if os.geteuid() != 0 or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, of the lower and the upper 32 capabilities
    assert libc.capget(header, sets) == 0, os.strerror(ctypes.get_errno())
    sets[0] &= ~(1 << 1)  # CAP_DAC_OVERRIDE, of those in effect
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())

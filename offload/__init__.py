"""The engine: exact hierarchical speculative decoding with weights and KV cache off the device.

Import it before torch: torch's OpenMP reads once, when it is loaded, how long its threads spin. By default some 6 ms;
where other programs run, too, a spinning thread takes the time of the one that it waits for, and passes take 6 to 40
times as long. 1,000 rounds are some 20 us. What the user set is kept, and ranks inherit it.
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

"""The inference engine: exact hierarchical speculative decoding with weights and KV cache off the device.

Import this package before torch: torch's OpenMP reads the spin time of its threads once, when it is loaded. The default
is some 6 ms. Where other programs run too, a spinning thread takes CPU time from the thread that it waits for, and
passes take 6 to 40 times as long. 1,000 rounds are some 20 us. A value that the user set is kept, and ranks inherit it.
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

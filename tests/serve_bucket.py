"""Serves the stand-in for a bucket in a process of its own: python tests/serve_bucket.py SHARE_THAT_FAILS SEED."""

import sys
import time

from bucket_stand_in import Store, serving

if __name__ == "__main__":
    with serving(Store(fails=float(sys.argv[1]), seed=int(sys.argv[2]), delay_seconds=0.5)) as address:
        print(address, flush=True)
        time.sleep(3600)

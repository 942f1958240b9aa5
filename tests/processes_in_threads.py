"""The processes of a run as threads, with a table in memory in place of JAX's coordination service."""

import threading

from jrl.device.processes import FAILURE, Processes


class Table:
    """A Store in memory."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def put(self, key, value):
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def wait(self, key, seconds):
        with self.changed:
            self.changed.wait_for(lambda: key in self.values or any(self.list(FAILURE)), seconds)
            return self.values.get(key)

    def list(self, folder):
        return {key: value for key, value in self.values.copy().items() if key.startswith(f"{folder}/")}

    def delete(self, key):
        del self.values[key]


def together(count, act):
    """Returns what `act` returns, or raises, in each of so many processes, which are threads here."""
    table, results = Table(), [None] * count

    def run(index):
        try:
            names = tuple(f"process {i} (machine-{i})" for i in range(count))
            results[index] = act(Processes(index, count, table, names))
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results, table

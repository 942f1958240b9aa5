"""Devices: the mesh and its logical axes, the cache of compiled programs, host memory."""

"""Google Cloud Storage: a client, its credentials, and private local copies of the objects that are read. No JAX."""

"""Google Cloud Storage: a client, its credentials, and private local copies of what is read. No JAX."""

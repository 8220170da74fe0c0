"""Types and facts shared by the whole engine. Nothing here imports jax."""

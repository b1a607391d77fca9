"""What `atoll train` trains: small models, corpora and the training loop."""

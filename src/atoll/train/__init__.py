"""What a user's training script touches: `atoll.join` and the object it returns."""

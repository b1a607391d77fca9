"""What a run leaves on disk: commit files, the tape, kept contributions, the exported model."""

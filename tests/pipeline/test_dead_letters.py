"""Messages that were given up: in the log they are no state, in the lake they are rows, and they can be sent again."""

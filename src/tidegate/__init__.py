"""Tidegate: a durable MQTT broker whose message log is a Spark table."""

__version__ = "0.1.0"

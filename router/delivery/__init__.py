"""From the store's delivery stream and journal to each client's stream of events."""

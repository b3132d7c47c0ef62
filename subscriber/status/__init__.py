"""The state of subscriptions: collected from the target and the publishers, and assessed."""

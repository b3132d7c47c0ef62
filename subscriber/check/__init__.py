"""Find what would keep a subscription from working: facts about both servers, and rules."""

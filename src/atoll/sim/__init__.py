"""The core in virtual time: links, learners of any speed, crashes, and checkers that live apart from the system."""

from tests.taken_away import WITHOUT, take_away

take_away(*WITHOUT)

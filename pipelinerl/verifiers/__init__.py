"""What judges an answer: outcome and reward, where a failure of the judge is never a wrong answer."""

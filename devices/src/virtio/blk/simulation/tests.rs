//! Checks of the policy on a part of the grid that contains each value of each dimension.

use super::*;

/// Every so many points are simulated.
const STRIDE: usize = 13;

#[test]
fn policy_on_the_grid_is_near_the_best_and_adds_little_latency() {
    let points: Vec<Point> = grid().into_iter().step_by(STRIDE).collect();
    let rows = simulate(&points);
    let near = |part: f64| share(&rows, |row| row.parts()[0] >= part);
    assert!(near(0.95) >= 0.9, "{}", near(0.95));
    assert!(near(0.85) >= 0.95, "{}", near(0.85));
    for row in &rows {
        let [part, reachable] = row.parts();
        assert!(part >= 0.55, "{:?}: {part}", row.point);
        assert!(
            part >= 0.65 * reachable.min(1.0),
            "{:?}: {part} of {reachable}",
            row.point
        );
    }
    let little = share(&rows, |row| row.added() <= 0.1);
    assert!(little >= 0.98, "{little}");
    let brief = share(&rows, Row::holds_briefly);
    assert!(brief >= 0.98, "{brief}");
}

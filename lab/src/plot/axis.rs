//! An axis: where a value lies, and which values are written beside it.

use crate::bench;

/// A value's place between two ends, linear or logarithmic.
#[derive(Clone, Debug)]
pub struct Scale {
    log: bool,
    least: f64,
    greatest: f64,
    /// Pixels of the two ends.
    from: i32,
    to: i32,
}

impl Scale {
    /// A scale on which all of `values` have a place. A linear one begins at 0, unless `values` lie far from it and
    /// `zero` does not insist.
    pub fn of(axis: &bench::Axis, values: &[f64], zero: bool) -> Self {
        let shown = |value: &&f64| value.is_finite() && (!axis.log || **value > 0.0);
        let least = values.iter().filter(shown).copied().reduce(f64::min);
        let greatest = values.iter().filter(shown).copied().reduce(f64::max);
        let (least, greatest) = (least.unwrap_or(1.0), greatest.unwrap_or(1.0));
        let (least, greatest) = if axis.log {
            let span = (greatest / least).max(1.5);
            let margin = span.powf(0.06).max(1.08);
            (least / margin, (greatest * margin).max(least * 1.5))
        } else {
            let far = !zero && least > 0.4 * greatest;
            let low = if far { least } else { least.min(0.0) };
            let high = greatest.max(if zero { 0.0 } else { low });
            let span = if high > low { high - low } else { 1.0 };
            let below = if low == 0.0 { 0.0 } else { 0.09 * span };
            (low - below, high + 0.07 * span)
        };
        Self {
            log: axis.log,
            least,
            greatest,
            from: 0,
            to: 1,
        }
    }

    /// The same from pixel `from` to pixel `to`.
    pub fn between(self, from: i32, to: i32) -> Self {
        Self { from, to, ..self }
    }

    /// A logarithmic scale gets its ends on powers of ten: bars stand on one.
    pub fn on_decades(mut self) -> Self {
        if self.log {
            self.least = 10f64.powf(self.least.log10().floor());
        }
        self
    }

    /// The pixel of a value; ends for what lies beyond, and for what has no place on a logarithmic axis.
    pub fn at(&self, value: f64) -> i32 {
        let share = if self.log {
            (value.max(self.least) / self.least).ln() / (self.greatest / self.least).ln()
        } else {
            (value - self.least) / (self.greatest - self.least)
        };
        let length = f64::from(self.to - self.from);
        self.from + (share.clamp(0.0, 1.0) * length).round() as i32
    }

    /// Whether a value can be shown.
    pub fn shows(&self, value: f64) -> bool {
        value.is_finite() && (!self.log || value > 0.0)
    }

    /// Values worth a line and a number.
    pub fn ticks(&self) -> Vec<f64> {
        if self.log {
            self.log_ticks()
        } else {
            self.linear_ticks()
        }
    }

    fn linear_ticks(&self) -> Vec<f64> {
        let step = nice((self.greatest - self.least) / 6.0);
        let first = (self.least / step).ceil() as i64;
        let last = (self.greatest / step).floor() as i64;
        (first..=last).map(|i| i as f64 * step).collect()
    }

    fn log_ticks(&self) -> Vec<f64> {
        let decades = (self.greatest / self.least).log10();
        let within: &[f64] = match decades {
            d if d < 0.7 => return self.linear_ticks(),
            d if d < 3.0 => &[1.0, 2.0, 5.0],
            _ => &[1.0],
        };
        let every = if decades > 8.0 { 2 } else { 1 };
        let (first, last) = (self.least.log10().floor(), self.greatest.log10().ceil());
        (first as i32..=last as i32)
            .step_by(every)
            .flat_map(|power| within.iter().map(move |m| m * 10f64.powi(power)))
            .filter(|value| (self.least..=self.greatest).contains(value))
            .collect()
    }
}

/// The round number next above: 1, 2 or 5 times a power of ten.
fn nice(value: f64) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    let factor = match value / power {
        f if f <= 1.0 => 1.0,
        f if f <= 2.0 => 2.0,
        f if f <= 5.0 => 5.0,
        _ => 10.0,
    };
    factor * power
}

/// A number in few characters: `0.05`, `12.5`, `4096`, `20 k`, `1.5 M`.
pub fn short(value: f64) -> String {
    let size = value.abs();
    let (scaled, unit) = match size {
        s if s >= 1e9 => (value / 1e9, " G"),
        s if s >= 1e6 => (value / 1e6, " M"),
        s if s >= 1e4 => (value / 1e3, " k"),
        _ => (value, ""),
    };
    let decimals = match scaled.abs() {
        s if s >= 99.95 || s == 0.0 => 0,
        s if s >= 9.995 => 1,
        s if s >= 0.995 => 2,
        s => (2.0 - s.log10().floor()).min(9.0) as usize,
    };
    // There is no less than nothing: `-0` is 0.
    let text = format!("{:.decimals$}", scaled + 0.0);
    let text = if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.')
    } else {
        &text
    };
    format!("{text}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use bench::Axis;

    #[test]
    fn every_value_has_a_place_between_the_ends() {
        for (axis, values) in [
            (Axis::log("x"), vec![20.0, 1000.0]),
            (Axis::log("x"), vec![0.0, 3.0]),
            (Axis::linear("x"), vec![-4.0, 17.0]),
            (Axis::linear("x"), vec![5.0]),
            (Axis::linear("x"), vec![0.0]),
            (Axis::linear("x"), vec![f64::NAN]),
            (Axis::log("x"), vec![]),
        ] {
            let scale = Scale::of(&axis, &values, false).between(100, 900);
            for value in values {
                assert!((100..=900).contains(&scale.at(value)), "{scale:?} {value}");
            }
            let ticks = scale.ticks();
            assert!((1..20).contains(&ticks.len()), "{scale:?} {ticks:?}");
        }
    }

    #[test]
    fn bars_stand_on_zero() {
        let scale = Scale::of(&Axis::linear("y"), &[90.0, 100.0], true).between(0, 100);
        assert_eq!(scale.at(0.0), 0);
    }

    #[test]
    fn ticks_are_round() {
        let scale = Scale::of(&Axis::linear("y"), &[0.0, 0.93], false);
        assert_eq!(
            scale.ticks().iter().map(|t| short(*t)).collect::<Vec<_>>(),
            ["0", "0.2", "0.4", "0.6", "0.8"]
        );
        let scale = Scale::of(&Axis::log("y"), &[2.0, 300.0], false);
        assert_eq!(scale.ticks(), [2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0]);
    }

    #[test]
    fn numbers_are_short() {
        let cases = [
            (0.0, "0"),
            (0.001, "0.001"),
            (0.0512, "0.0512"),
            (1.5, "1.5"),
            (12.345, "12.3"),
            (100.0, "100"),
            (4096.0, "4096"),
            (20_000.0, "20 k"),
            (1.5e6, "1.5 M"),
            (-3.0, "-3"),
            (-0.0, "0"),
        ];
        for (value, text) in cases {
            assert_eq!(short(value), text);
        }
    }
}

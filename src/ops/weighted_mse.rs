//! Squared errors weighed by frame: what both families' losses are sums of.

use candle_core::{Result, Tensor};

/// The sum over c, f and x of `weight` [F] x `mask` [C, F, X] (1 without one) x (prediction - target)^2, both [C, F, X].
/// A gradient goes to the prediction alone.
pub fn weighted_mse(prediction: &Tensor, target: &Tensor, weight: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if prediction.device().is_cuda() {
        return crate::cuda::weighted_mse(prediction, target, weight, mask);
    }
    super::reference::weighted_mse(prediction, target, weight, mask)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};

    #[test]
    fn errors_count_by_weight_and_mask_and_only_predictions_learn() {
        let cpu = Device::Cpu;
        let p = Var::from_slice(&[1f64, 2., 3., 4., 5., 6.], (1, 3, 2), &cpu).unwrap();
        let t = Var::from_slice(&[0f64, 0., 1., 1., 9., 9.], (1, 3, 2), &cpu).unwrap();
        let weight = Tensor::new(&[1f64, 0.5, 2.], &cpu).unwrap();
        let mask = Tensor::new(&[1f64, 0., 1., 1., 0., 1.], &cpu).unwrap().reshape((1, 3, 2)).unwrap();
        let loss = weighted_mse(&p, &t, &weight, Some(&mask)).unwrap();
        assert_eq!(loss.to_scalar::<f64>().unwrap(), 1.0 + 0.5 * (4.0 + 9.0) + 2.0 * 9.0);
        let store = loss.backward().unwrap();
        let gradient: Vec<f64> = store.get(&p).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        assert_eq!(gradient, [2.0, 0.0, 2.0, 3.0, 0.0, -12.0]);
        assert!(store.get(&t).is_none());
        let whole = weighted_mse(&p, &t, &weight, None).unwrap();
        assert_eq!(whole.to_scalar::<f64>().unwrap(), 1.0 + 4.0 + 6.5 + 2.0 * 25.0);
    }
}

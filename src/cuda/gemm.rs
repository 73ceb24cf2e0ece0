//! Matrix products through cuBLASLt.
//!
//! Matrices are row-major here and column-major there, so every product is computed transposed: a row-major [n, k] is
//! a column-major [k, n]. Sums are f32 whatever the operands. The algorithm is the library's first choice for the exact
//! shape, asked once and kept: choosing by timing would make two runs of one seed differ.

use super::launch::{Operand, Slice};
use super::timeline::Timeline;
use crate::{Error, Exit, Result};
use cudarc::cublaslt::{result, sys};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use std::cmp::Ordering;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

/// Scratch space for the library; 32 MiB is what NVIDIA advises for Hopper.
const WORKSPACE: usize = 32 << 20;

/// Algorithms of the library that are looked at.
const MOST: usize = 40;

/// Which of the three products of a Linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Product {
    /// y [n, out] = x [n, in] W^T + bias
    Forward,
    /// gelu of the same; its argument is kept too, or not
    ForwardGelu { kept: bool },
    /// dx [n, in] = dy [n, out] W
    Input,
    /// The same times gelu' of what the input was made from
    InputGelu,
    /// dx [n, in] f32 += dy [n, out] W
    InputSum,
    /// dW [out, in] f32 += dy^T x
    Weight,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    product: Product,
    n: usize,
    inputs: usize,
    outputs: usize,
    /// Elements from one row to the next of x (or dx) and of y (or dy).
    x_stride: usize,
    y_stride: usize,
}

/// Addresses that an epilogue reads or writes; 0 where it has none.
#[derive(Clone, Copy, Debug, Default)]
struct Extra {
    /// [out]
    bias: u64,
    /// What gelu is taken of, as large as the result.
    argument: u64,
}

/// A row-major matrix inside a wider one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<E> {
    pub data: Slice<E>,
    pub stride: usize,
}

impl<E> Rows<E> {
    pub fn new(data: Slice<E>, stride: usize) -> Self {
        Self { data, stride }
    }
}

/// The library's handle, its scratch space, and the algorithms chosen so far. Without a device it computes nothing.
#[derive(Debug)]
pub(crate) struct Gemm {
    device: Option<Library>,
    operand: sys::cudaDataType,
}

#[derive(Debug)]
struct Library {
    handle: sys::cublasLtHandle_t,
    workspace: CudaSlice<u8>,
    stream: Arc<CudaStream>,
    timeline: Arc<Timeline>,
    algorithms: Mutex<HashMap<Shape, Plan>>,
}

/// Descriptors and algorithm of one shape.
#[derive(Debug)]
struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    /// Of a, b and the result.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

// SAFETY: the handle and descriptors are used by one thread at a time, behind the mutex or by value.
unsafe impl Send for Library {}
// SAFETY: as above; cuBLASLt handles are documented as usable from several threads.
unsafe impl Sync for Library {}
// SAFETY: plain descriptors, only read after they were made.
unsafe impl Send for Plan {}

impl Drop for Library {
    fn drop(&mut self) {
        let mut plans = self.algorithms.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, plan) in plans.drain() {
            plan.destroy();
        }
        // SAFETY: made by `create_handle` and used by nothing any more.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

impl Plan {
    fn destroy(self) {
        // SAFETY: each was made by `Library::plan` and is used by nothing any more.
        unsafe {
            let _ = result::destroy_matmul_desc(self.description);
            for layout in self.layouts {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

/// What a failed call of the library means.
fn failed(what: impl std::fmt::Display) -> impl FnOnce(result::CublasError) -> Error {
    let what = what.to_string();
    move |error| {
        Error::new(Exit::Unavailable, "cublas_error", format!("{what}: {error}"))
            .hint("the last checkpoint is intact; cuBLASLt comes with CUDA 13 or the PyPI package nvidia-cublas")
    }
}

impl Gemm {
    /// For operands of bf16, or f32 (then without TF32: that path is for checks).
    pub fn new(stream: Arc<CudaStream>, timeline: Arc<Timeline>, half: bool) -> Result<Self> {
        let handle = result::create_handle().map_err(failed("opening cuBLASLt"))?;
        let workspace = stream
            .alloc_zeros::<u8>(WORKSPACE)
            .map_err(|error| super::launch::device_error(error, "allocating cuBLASLt's scratch space"))?;
        let library = Library { handle, workspace, stream, timeline, algorithms: Mutex::default() };
        Ok(Self { device: Some(library), operand: Self::dtype(half) })
    }

    /// Computes nothing: for counting memory.
    pub fn counting() -> Self {
        Self { device: None, operand: Self::dtype(true) }
    }

    fn dtype(half: bool) -> sys::cudaDataType {
        match half {
            true => sys::cudaDataType_t::CUDA_R_16BF,
            false => sys::cudaDataType_t::CUDA_R_32F,
        }
    }

    /// y [n, out] = x [n, in] W^T + bias; W [out, in].
    #[allow(clippy::too_many_arguments)]
    pub fn forward(
        &self,
        x: Rows<Operand>,
        weight: Slice<Operand>,
        bias: Slice<Operand>,
        y: Rows<Operand>,
        n: usize,
        inputs: usize,
        outputs: usize,
    ) -> Result<()> {
        let shape = Shape { product: Product::Forward, n, inputs, outputs, x_stride: x.stride, y_stride: y.stride };
        let extra = Extra { bias: bias.address(), argument: 0 };
        self.run(shape, weight.address(), x.data.address(), y.data.address(), extra)
    }

    /// y [n, out] = gelu(x [n, in] W^T + bias), and its argument if there is room for it.
    #[allow(clippy::too_many_arguments)]
    pub fn forward_gelu(
        &self,
        x: Slice<Operand>,
        weight: Slice<Operand>,
        bias: Slice<Operand>,
        argument: Option<Slice<Operand>>,
        y: Slice<Operand>,
        n: usize,
        inputs: usize,
        outputs: usize,
    ) -> Result<()> {
        let product = Product::ForwardGelu { kept: argument.is_some() };
        let shape = Shape { product, n, inputs, outputs, x_stride: inputs, y_stride: outputs };
        let extra = Extra { bias: bias.address(), argument: argument.map_or(0, |argument| argument.address()) };
        self.run(shape, weight.address(), x.address(), y.address(), extra)
    }

    /// du [n, in] = dy [n, out] W gelu'(u).
    #[allow(clippy::too_many_arguments)]
    pub fn input_gradient_gelu(
        &self,
        dy: Slice<Operand>,
        weight: Slice<Operand>,
        argument: Slice<Operand>,
        du: Slice<Operand>,
        n: usize,
        inputs: usize,
        outputs: usize,
    ) -> Result<()> {
        let shape = Shape { product: Product::InputGelu, n, inputs, outputs, x_stride: inputs, y_stride: outputs };
        let extra = Extra { bias: 0, argument: argument.address() };
        self.run(shape, weight.address(), dy.address(), du.address(), extra)
    }

    /// dx [n, in] = dy [n, out] W.
    pub fn input_gradient(
        &self,
        dy: Rows<Operand>,
        weight: Slice<Operand>,
        dx: Rows<Operand>,
        n: usize,
        inputs: usize,
        outputs: usize,
    ) -> Result<()> {
        let shape = Shape { product: Product::Input, n, inputs, outputs, x_stride: dx.stride, y_stride: dy.stride };
        self.run(shape, weight.address(), dy.data.address(), dx.data.address(), Extra::default())
    }

    /// dx [n, in] += dy [n, out] W, in f32.
    pub fn input_gradient_sum(
        &self,
        dy: Rows<Operand>,
        weight: Slice<Operand>,
        dx: Rows<f32>,
        n: usize,
        inputs: usize,
        outputs: usize,
    ) -> Result<()> {
        let shape = Shape { product: Product::InputSum, n, inputs, outputs, x_stride: dx.stride, y_stride: dy.stride };
        self.run(shape, weight.address(), dy.data.address(), dx.data.address(), Extra::default())
    }

    /// dW [out, in] += dy^T x, in f32.
    pub fn weight_gradient(
        &self,
        dy: Rows<Operand>,
        x: Rows<Operand>,
        gradient: Slice<f32>,
        n: usize,
        inputs: usize,
        outputs: usize,
    ) -> Result<()> {
        let shape = Shape { product: Product::Weight, n, inputs, outputs, x_stride: x.stride, y_stride: dy.stride };
        self.run(shape, x.data.address(), dy.data.address(), gradient.address(), Extra::default())
    }

    fn run(&self, shape: Shape, a: u64, b: u64, result: u64, extra: Extra) -> Result<()> {
        let Some(library) = &self.device else { return Ok(()) };
        if shape.n == 0 {
            return Ok(());
        }
        library.run(shape, self.operand, a, b, result, extra)
    }
}

impl Library {
    fn run(&self, shape: Shape, operand: sys::cudaDataType, a: u64, b: u64, out: u64, extra: Extra) -> Result<()> {
        let mut plans = self.algorithms.lock().unwrap_or_else(PoisonError::into_inner);
        let plan = match plans.entry(shape) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => place.insert(self.plan(shape, operand, preferred(&shape))?),
        };
        let Shape { product, n, inputs, outputs, .. } = shape;
        let name = || format!("{product:?}, {inputs} -> {outputs}, {n} rows");
        self.timeline.around(&self.stream, name, || self.multiply(plan, shape, a, b, out, extra))
    }

    fn multiply(&self, plan: &Plan, shape: Shape, a: u64, b: u64, out: u64, extra: Extra) -> Result<()> {
        let failed = |what: &str| failed(format!("{what} of {shape:?}"));
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        for (attribute, address) in [
            (Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, extra.bias),
            (Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, extra.argument),
        ] {
            if address != 0 {
                // SAFETY: both attributes are pointers, and so is an address.
                unsafe { set(plan.description, attribute, &address) }.map_err(failed("the epilogue"))?;
            }
        }
        let (one, beta) = (1f32, f32::from(u8::from(shape.sums())));
        let pointer = |value: &f32| std::ptr::from_ref(value).cast::<c_void>();
        let (workspace, _guard) = self.workspace.device_ptr(&self.stream);
        let [a_layout, b_layout, out_layout] = plan.layouts;
        // SAFETY: the callers pass addresses of matrices as large as the shape says, in live allocations.
        unsafe {
            result::matmul(
                self.handle,
                plan.description,
                pointer(&one),
                pointer(&beta),
                a as *const c_void,
                a_layout,
                b as *const c_void,
                b_layout,
                out as *const c_void,
                out_layout,
                out as *mut c_void,
                out_layout,
                &plan.algorithm,
                workspace as *mut c_void,
                WORKSPACE,
                self.stream.cu_stream() as sys::cudaStream_t,
            )
        }
        .map_err(failed("the matrix product"))
    }

    /// Descriptors and the library's algorithm number `choice`, or its first if there are fewer.
    fn plan(&self, shape: Shape, operand: sys::cudaDataType, choice: usize) -> Result<Plan> {
        let failed = |what: &str| failed(format!("{what} of {shape:?}"));
        let wide = sys::cudaDataType_t::CUDA_R_32F;
        let description = result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, wide)
            .map_err(failed("the description"))?;
        let Shape { n, inputs, outputs, x_stride, y_stride, .. } = shape;
        let layout = |dtype, rows: usize, columns: usize, stride: usize| {
            result::create_matrix_layout(dtype, rows as u64, columns as u64, stride as i64).map_err(failed("a layout"))
        };
        // Column-major: rows, columns, and the distance between columns.
        let weight = || layout(operand, inputs, outputs, inputs);
        let x = |dtype| layout(dtype, inputs, n, x_stride);
        let y = || layout(operand, outputs, n, y_stride);
        let (transposed, layouts) = match shape.product {
            Product::Forward | Product::ForwardGelu { .. } => ([true, false], [weight()?, x(operand)?, y()?]),
            Product::Input | Product::InputGelu => ([false, false], [weight()?, y()?, x(operand)?]),
            Product::InputSum => ([false, false], [weight()?, y()?, x(wide)?]),
            Product::Weight => ([false, true], [x(operand)?, y()?, layout(wide, inputs, outputs, inputs)?]),
        };
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let attributes = [Attribute::CUBLASLT_MATMUL_DESC_TRANSA, Attribute::CUBLASLT_MATMUL_DESC_TRANSB];
        for (attribute, transposed) in attributes.into_iter().zip(transposed) {
            // CUBLAS_OP_N and CUBLAS_OP_T, an enum that this part of the bindings lacks.
            let operation = i32::from(transposed);
            // SAFETY: the attribute is an i32.
            unsafe { set(description, attribute, &operation) }.map_err(failed("the transposition"))?;
        }
        use sys::cublasLtEpilogue_t as Epilogue;
        let (epilogue, argument_stride) = match shape.product {
            Product::Forward => (Some(Epilogue::CUBLASLT_EPILOGUE_BIAS), None),
            Product::ForwardGelu { kept: false } => (Some(Epilogue::CUBLASLT_EPILOGUE_GELU_BIAS), None),
            Product::ForwardGelu { kept: true } => (Some(Epilogue::CUBLASLT_EPILOGUE_GELU_AUX_BIAS), Some(outputs)),
            Product::InputGelu => (Some(Epilogue::CUBLASLT_EPILOGUE_DGELU), Some(inputs)),
            Product::Input | Product::InputSum | Product::Weight => (None, None),
        };
        if let Some(epilogue) = epilogue {
            // SAFETY: the attributes are such an enum and such a type.
            unsafe {
                set(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)
                    .and_then(|()| set(description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &operand))
            }
            .map_err(failed("the epilogue"))?;
        }
        if let Some(stride) = argument_stride {
            let stride = stride as i64;
            // SAFETY: the attributes are a distance of i64 and such a type.
            unsafe {
                set(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &stride)
                    .and_then(|()| set(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, &operand))
            }
            .map_err(failed("the epilogue"))?;
        }
        let preference = result::create_matmul_pref().map_err(failed("the preference"))?;
        // SAFETY: integers and a float, for which zeros are values; those read below are written by the library.
        let mut found: [sys::cublasLtMatmulHeuristicResult_t; MOST] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        // SAFETY: the attribute is a size in bytes; the preference and all layouts were made above, and `found` has room
        // for as many results as are asked for.
        let heuristic = unsafe {
            result::set_matmul_pref_attribute(
                preference,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                std::ptr::from_ref(&WORKSPACE).cast(),
                size_of::<usize>(),
            )
            .and_then(|()| {
                let [a, b, out] = layouts;
                sys::cublasLtMatmulAlgoGetHeuristic(
                    self.handle,
                    description,
                    a,
                    b,
                    out,
                    out,
                    preference,
                    choice as i32 + 1,
                    found.as_mut_ptr(),
                    &mut count,
                )
                .result()
            })
        };
        // SAFETY: made above, used by nothing any more.
        let _ = unsafe { result::destroy_matmul_pref(preference) };
        heuristic.map_err(failed("no algorithm"))?;
        let usable = |result: &&sys::cublasLtMatmulHeuristicResult_t| result.state.result().is_ok();
        let chosen = found.iter().take(count as usize).filter(usable).nth(choice);
        let first = found.iter().take(count as usize).find(usable);
        match chosen.or(first) {
            Some(result) => Ok(Plan { description, layouts, algorithm: result.algo }),
            None => {
                let error =
                    Error::new(Exit::Unavailable, "cublas_error", format!("cuBLASLt has no algorithm for {shape:?}"));
                Err(error.hint("update cuBLAS, or take other sizes"))
            }
        }
    }
}

/// Which of the library's proposals to take. Its first is not always the fastest; what is here was measured with
/// `lbva-tui bench gemm` on an H200, and is fixed, because a choice by timing would make two runs of one seed differ.
fn preferred(shape: &Shape) -> usize {
    if shape.n < 4096 || shape.inputs.min(shape.outputs) < 2048 {
        return 0;
    }
    let widens = shape.outputs.cmp(&shape.inputs);
    match (shape.product, widens) {
        (Product::ForwardGelu { kept: true }, _) => 4,
        (Product::ForwardGelu { kept: false }, _) => 1,
        (Product::InputGelu, _) => 6,
        (Product::Input, Ordering::Equal) => 6,
        (Product::Weight, Ordering::Equal) => 26,
        (Product::Weight, Ordering::Less) => 6,
        (Product::Weight, Ordering::Greater) if shape.outputs >= 4 * shape.inputs => 6,
        _ => 0,
    }
}

/// One algorithm's speed.
#[derive(Clone, Debug, serde::Serialize)]
pub(crate) struct AlgorithmTime {
    pub product: String,
    pub inputs: usize,
    pub outputs: usize,
    /// Place among the library's proposals.
    pub choice: usize,
    pub ms: f64,
    pub tflops: f64,
}

impl Gemm {
    /// Times the library's proposals for the products of a Linear layer with `n` rows. `x`, `y` and `w` hold `n` rows of
    /// inputs and outputs and the weights; `wide` an f32 gradient of these,
    /// `spare` as much as the larger of x and y.
    pub fn time_algorithms(
        &self,
        (inputs, outputs, n): (usize, usize, usize),
        x: Slice<Operand>,
        y: Slice<Operand>,
        w: Slice<Operand>,
        wide: Slice<f32>,
        spare: Slice<Operand>,
    ) -> Result<Vec<AlgorithmTime>> {
        let Some(library) = &self.device else { return Ok(Vec::new()) };
        let mut times = Vec::new();
        let mut products = vec![Product::Forward, Product::Input, Product::Weight];
        if outputs > inputs {
            products.extend([Product::ForwardGelu { kept: false }, Product::ForwardGelu { kept: true }]);
        }
        if inputs > outputs {
            products.push(Product::InputGelu);
        }
        for product in products {
            let shape = Shape { product, n, inputs, outputs, x_stride: inputs, y_stride: outputs };
            let (a, b, out) = match product {
                Product::Forward | Product::ForwardGelu { .. } => (w, x.address(), y.address()),
                Product::Input | Product::InputGelu | Product::InputSum => (w, y.address(), x.address()),
                Product::Weight => (x, y.address(), wide.address()),
            };
            let (bias, argument) = match product {
                Product::Forward | Product::ForwardGelu { kept: false } => (w.address(), 0),
                Product::ForwardGelu { kept: true } => (w.address(), spare.address()),
                Product::InputGelu => (0, spare.address()),
                Product::Input | Product::InputSum | Product::Weight => (0, 0),
            };
            let extra = Extra { bias, argument };
            for choice in 0..MOST {
                let plan = library.plan(shape, self.operand, choice)?;
                let mut spans = Vec::new();
                for _ in 0..4 {
                    let mark = |error| super::launch::device_error(error, "timing a product");
                    let flags = cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
                    let begin = library.stream.record_event(Some(flags)).map_err(mark)?;
                    library.multiply(&plan, shape, a.address(), b, out, extra)?;
                    let end = library.stream.record_event(Some(flags)).map_err(mark)?;
                    spans.push(f64::from(begin.elapsed_ms(&end).map_err(mark)?));
                }
                plan.destroy();
                spans.sort_by(f64::total_cmp);
                let ms = spans[spans.len() / 2];
                let tflops = 2.0 * (n * inputs) as f64 * outputs as f64 / ms / 1e9;
                times.push(AlgorithmTime { product: format!("{product:?}"), inputs, outputs, choice, ms, tflops });
            }
        }
        Ok(times)
    }
}

impl Shape {
    /// Whether the result is added to what is there.
    fn sums(&self) -> bool {
        matches!(self.product, Product::InputSum | Product::Weight)
    }
}

/// Sets an attribute of a product.
///
/// # Safety
/// `value` must be of the type that the library's documentation gives for the attribute.
unsafe fn set<T>(
    description: sys::cublasLtMatmulDesc_t,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> std::result::Result<(), result::CublasError> {
    // SAFETY: `value` lives through the call, which copies it.
    unsafe {
        result::set_matmul_desc_attribute(description, attribute, std::ptr::from_ref(value).cast(), size_of::<T>())
    }
}
